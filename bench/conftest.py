"""Lets plain `pytest bench/test_race.py` run the race over the captured inputs."""

from flash_rosetta.bench.plugin import RaceOptions, RacePlugin


def pytest_configure(config):
    plugins = config.pluginmanager
    if not any(isinstance(plugin, RacePlugin) for plugin in plugins.get_plugins()):
        plugins.register(RacePlugin(RaceOptions()))
