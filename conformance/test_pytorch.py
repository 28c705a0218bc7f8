"""How a backend lives with the rest of PyTorch: compiler, autocast, streams, graphs, devices."""

import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import flash_rosetta
from flash_rosetta import Inputs, Problem, ops
from flash_rosetta.conformance import checks
from flash_rosetta.conformance.cases import LAYOUTS, TOP_LEFT, Case, Lane

GRADIENTS = ("dq", "dk", "dv")

COMPILE_LIMIT_S = 300


def dense(problem: Problem, device: torch.device) -> Inputs:
    return LAYOUTS["dense"](problem.inputs(device))


def with_gradients(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    return q, k, v


def compiler(device: torch.device) -> str:
    """Everything of torch.compile but code generation, which on a CPU takes a C++ compiler."""
    return "inductor" if device.type == "cuda" else "aot_eager"


@pytest.mark.capability("compile")
@pytest.mark.limit(COMPILE_LIMIT_S)
def test_compiles_whole_with_dynamic_lengths(backend: str, lane: Lane, device: torch.device):
    """One graph, compiled once, serves lengths that it was not compiled for, odd ones too."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    compilations = CompileCounterWithBackend(compiler(device))

    @torch.compile(fullgraph=True, backend=compilations)
    def loss(x: Inputs) -> tuple[Tensor, Tensor]:
        o, lse = checks.flash_rosetta.attention(
            *x[:3], is_causal=True, return_lse=True, backend=backend
        )
        return o * 2, lse + 1

    for seqlen in lane.lengths:
        problem = lane.problem(seqlen, batch=1, num_heads=1, **TOP_LEFT)
        x = problem.inputs(device)
        q, k, v = with_gradients(x)
        checks.attention(backend, q, k, v, is_causal=True)  # or skip
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 2)
        o, lse = loss(Inputs(q, k, v, x.do, x.dlse))
        grads = torch.autograd.grad((o, lse), (q, k, v), (x.do / 2, x.dlse))
        got = checks.Outputs(o.detach() / 2, lse.detach() - 1, *grads)
        checks.compare(backend, got, x, problem, label=f"{problem.id}, compiled")
    assert compilations.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.capability("compile")
@pytest.mark.limit(COMPILE_LIMIT_S)
def test_opcheck(backend: str, lane: Lane, device: torch.device):
    """Schema, fake tensors, autograd registration and traced gradients of both custom ops."""
    problem = lane.problem(num_heads=2, num_kv_heads=1, **TOP_LEFT)
    x = LAYOUTS["bshd"](problem.inputs(device))
    q, k, v = with_gradients(x)
    checks.attention(backend, q, k, v, is_causal=True)  # or skip
    o, lse = ops.forward(q, k, v, True, "top_left", problem.scale, True, backend)
    opcheck(ops.forward, (q, k, v, True, "top_left", problem.scale, True, backend))
    saved = (t.detach() for t in (x.do, x.dlse, x.q, x.k, x.v, o, lse))
    opcheck(ops.backward, (*saved, True, "top_left", problem.scale, backend))


def opcheck(op: object, args: tuple) -> None:
    from torch.testing._internal.optests import OpCheckError  # imports Triton

    try:
        torch.library.opcheck(op, args)
    except OpCheckError as error:
        pytest.fail(str(error))


def test_the_op_is_seen_by_whoever_must_see_it(backend: str, lane: Lane, device: torch.device):
    """A call that needs no gradient may go past the dispatcher, but not past these."""
    q, k, v, *_ = lane.problem(num_heads=2, num_kv_heads=1).inputs(device)
    checks.attention(backend, q, k, v)  # or skip

    def call(q: Tensor) -> Tensor:
        return checks.attention(backend, q, k, v)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(q), FakeTensor)
    called = [node.target for node in make_fx(call)(q).graph.nodes if node.op == "call_function"]
    assert torch.ops.flash_rosetta.forward.default in called
    lazily_negative = torch.complex(torch.zeros_like(q.float()), -q.float()).conj().imag
    assert lazily_negative.is_neg()
    q, k, v = q.float(), k.float(), v.float()
    assert torch.equal(call(lazily_negative), call(q))


@pytest.mark.capability("torch.func")
def test_functional_gradients(backend: str, lane: Lane, device: torch.device):
    """`torch.func.vjp` gives what autograd gives; what it cannot give raises, and is not zero."""
    problem = lane.problem(num_heads=2, num_kv_heads=1, **TOP_LEFT)
    x = dense(problem, device)
    want = checks.run(backend, x, problem, gradients=GRADIENTS)  # or skip

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_rosetta.attention(q, k, v, is_causal=True, return_lse=True, backend=backend)

    def loss(q: Tensor) -> Tensor:
        return call(q, x.k, x.v)[0].square().sum()

    outputs, vjp = torch.func.vjp(call, *x[:3])
    checks.agree_but_for_order(problem, checks.Outputs(*outputs, *vjp(x[3:])), want)
    with pytest.raises(NotImplementedError, match="once"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(x.q)
    with pytest.raises(NotImplementedError, match="batching rule"):
        torch.func.vmap(lambda q: call(q[None], x.k[:1], x.v[:1])[0])(x.q)
    with pytest.raises(NotImplementedError, match="batching rule"):
        torch.func.jacrev(lambda q: call(q, x.k, x.v)[0].sum((0, 1, 2)))(x.q)


def test_forward_mode_raises(backend: str, lane: Lane, device: torch.device):
    """A tangent must not be dropped, nor come out as zero."""
    q, k, v, *_ = lane.problem().inputs(device)
    checks.attention(backend, q, k, v)  # or skip
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: checks.attention(backend, q, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        checks.attention(backend, q, forward_ad.make_dual(k, k), v)


def test_meta_tensors_have_shapes():
    q, k = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 6, 8, device="meta")
    o, lse = flash_rosetta.attention(q, k, k, return_lse=True)
    assert o.is_meta
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])


@pytest.mark.thorough
@pytest.mark.capability("compile")
@pytest.mark.limit(COMPILE_LIMIT_S)
def test_compiles_with_a_scale_that_changes(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(num_heads=1)
    q, k, v, *_ = problem.inputs(device)
    checks.attention(backend, q, k, v)  # or skip
    compiled = torch.compile(
        lambda q, scale: flash_rosetta.attention(q, k, v, scale=scale, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    for scale in (0.5, 0.7, 1, 2):
        want = flash_rosetta.attention(q, k, v, scale=scale, backend=backend)
        assert torch.equal(compiled(q, scale), want)
    torch._dynamo.reset()


@pytest.mark.capability("compile", "autocast")
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traces_with_sizes_that_are_symbols(
    backend: str, lane: Lane, device: torch.device, mode: str
):
    problem = lane.problem(num_heads=1)
    q, k, v, *_ = problem.inputs(device)
    want = checks.attention(backend, q, k, v)  # or skip
    traced = make_fx(
        lambda q, k, v: flash_rosetta.attention(q, k, v, backend=backend), tracing_mode=mode
    )(q, k, v)
    assert torch.equal(traced(q, k, v), want)


@pytest.mark.thorough
@pytest.mark.limit(COMPILE_LIMIT_S)
def test_compiles_under_autocast(backend: str, lane: Lane, device: torch.device):
    """Autocast around the compiled function, and inside it."""
    problem = lane.problem(num_heads=1, dtype=torch.float32)
    q, k, v, *_ = problem.inputs(device)

    def cast(q: Tensor) -> Tensor:
        with torch.autocast(device.type, lane.dtype):
            return checks.attention(backend, q, k, v)

    want = cast(q)  # or skip
    assert want.dtype == lane.dtype

    def inside(q: Tensor) -> Tensor:
        with torch.autocast(device.type, lane.dtype):
            return flash_rosetta.attention(q, k, v, backend=backend)

    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(q), want)
    around = torch.compile(
        lambda q: flash_rosetta.attention(q, k, v, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.autocast(device.type, lane.dtype):
        assert torch.equal(around(q), want)
    torch._dynamo.reset()


@pytest.mark.capability("autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_casts_as_sdpa_does(
    backend: str, lane: Lane, device: torch.device, dtype: torch.dtype
):
    problem = lane.problem(dtype=torch.float32, **TOP_LEFT)
    x = problem.inputs(device)
    q, k, v = with_gradients(x)
    with torch.autocast(device.type, dtype):
        o, lse = checks.attention(backend, q, k, v, is_causal=True, return_lse=True)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32
    do = x.do.to(dtype)
    grads = torch.autograd.grad((o, lse), (q, k, v), (do, x.dlse))
    assert all(grad.dtype == torch.float32 for grad in grads)
    low = Inputs(*(t.to(dtype) for t in x[:3]), do, x.dlse)
    got = checks.Outputs(o.detach(), lse.detach(), *grads)
    checks.compare(backend, got, low, replace(problem, dtype=dtype), label="autocast")


@pytest.mark.capability("autocast")
def test_autocast_leaves_fp64_and_its_own_dtype_alone(
    backend: str, lane: Lane, device: torch.device
):
    x = lane.problem().inputs(device)
    plain = checks.attention(backend, x.q, x.k, x.v)
    with torch.autocast(device.type, lane.dtype):
        assert torch.equal(checks.attention(backend, x.q, x.k, x.v), plain)


@pytest.mark.capability("checkpoint")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["modern", "reentrant"])
def test_checkpoint_recomputes_the_same(
    backend: str, lane: Lane, device: torch.device, use_reentrant: bool
):
    problem = lane.problem(**TOP_LEFT)
    x = dense(problem, device)
    q, k, v = with_gradients(x)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return checks.attention(backend, q, k, v, is_causal=True, return_lse=True)

    o, lse = checkpoint(call, q, k, v, use_reentrant=use_reentrant)
    torch.autograd.backward((o, lse), (x.do, x.dlse))
    got = checks.Outputs(o.detach(), lse.detach(), q.grad, k.grad, v.grad)
    checks.compare(backend, got, x, problem, label="checkpoint")


class Attend(torch.nn.Module):
    """A projection to packed q, k and v, and attention."""

    def __init__(self, problem: Problem, device: torch.device, backend: str):
        super().__init__()
        self.problem, self.backend = problem, backend
        width = problem.num_heads * problem.head_dim
        self.qkv = torch.nn.Linear(width, 3 * width, device=device, dtype=problem.dtype)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (3, self.problem.num_heads, self.problem.head_dim))
        q, k, v = packed.transpose(1, 3).unbind(2)
        return checks.attention(self.backend, q, k, v, is_causal=True)


@pytest.mark.capability("distributed")
def test_distributed_data_parallel(
    backend: str, lane: Lane, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """A wrapped module on one process has the gradients of the bare one."""
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        pytest.skip("needs torch.distributed, with no process group yet")
    problem = lane.problem(num_heads=2, **TOP_LEFT)
    module = Attend(problem, device, backend)
    x = torch.randn(2, problem.seqlen_q, module.qkv.in_features, device=device).to(problem.dtype)
    module(x).square().sum().backward()
    bare = [p.grad for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    collective = "nccl" if device.type == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a process group replaces it
    torch.distributed.init_process_group(collective, store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        wrapped(x).square().sum().backward()
        for (name, parameter), want in zip(module.named_parameters(), bare, strict=True):
            checks.agree(problem, name, parameter.grad, want)
    finally:
        torch.distributed.destroy_process_group()


def test_a_retained_graph_gives_the_same_again(backend: str, lane: Lane, device: torch.device):
    problem = lane.problem(**TOP_LEFT)
    x = dense(problem, device)
    q, k, v = with_gradients(x)
    o, lse = checks.attention(backend, q, k, v, is_causal=True, return_lse=True)
    for _ in range(2):
        grads = torch.autograd.grad((o, lse), (q, k, v), (x.do, x.dlse), retain_graph=True)
        got = checks.Outputs(o.detach(), lse.detach(), *grads)
        checks.compare(backend, got, x, problem, label="retained graph")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend: str, lane: Lane, device: torch.device, mode: type):
    x = lane.problem().inputs(device)
    q, k, v = with_gradients(x)
    with mode():
        o = checks.attention(backend, q, k, v)
    assert not o.requires_grad
    assert torch.equal(o, checks.attention(backend, x.q, x.k, x.v))


@pytest.mark.capability("gradient_of_lse")
@pytest.mark.parametrize("through", ["o", "lse"])
def test_gradient_of_one_output(backend: str, lane: Lane, device: torch.device, through: str):
    case = Case(purpose=f"only_{through}", problem=lane.problem(**TOP_LEFT))
    got = checks.solves(backend, case, device, gradients=GRADIENTS, through=through)
    assert through == "o" or not got["dv"].any(), "lse does not depend on v"


def test_gradient_of_a_sum(backend: str, lane: Lane, device: torch.device):
    """`o.sum().backward()` passes on a gradient of which every stride is 0."""
    problem = lane.problem(**TOP_LEFT)
    x = dense(problem, device)
    q, k, v = with_gradients(x)
    o, lse = checks.attention(backend, q, k, v, is_causal=True, return_lse=True)
    o.sum().backward()
    got = checks.Outputs(o.detach(), lse.detach(), q.grad, k.grad, v.grad)
    ones = x._replace(do=torch.ones_like(x.do))
    checks.compare(backend, got, ones, problem, through="o", label="o.sum().backward()")


def test_threads_do_not_disturb_each_other(backend: str, lane: Lane, device: torch.device):
    if lane.name == "interpreter":
        pytest.skip("Triton's interpreter runs on one thread")
    problems = [lane.problem(lane.seqlen + i, **TOP_LEFT) for i in range(3)]
    inputs = [dense(problem, device) for problem in problems]
    checks.attention(backend, *with_gradients(inputs[0]), is_causal=True)  # or skip
    results: dict[int, checks.Outputs] = {}

    def work(i: int) -> None:
        q, k, v = with_gradients(inputs[i])
        o, lse = checks.attention(backend, q, k, v, is_causal=True, return_lse=True)
        grads = torch.autograd.grad((o, lse), (q, k, v), inputs[i][3:])
        results[i] = checks.Outputs(o.detach(), lse.detach(), *grads)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (problem, x) in enumerate(zip(problems, inputs, strict=True)):
        assert i in results, f"thread {i} raised"
        checks.compare(backend, results[i], x, problem, label=f"thread {i}")


@pytest.mark.capability("deterministic")
def test_deterministic_algorithms(
    backend: str, lane: Lane, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Under `torch.use_deterministic_algorithms` it runs, or says why not; never with a warning."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    problem = lane.problem(deterministic=True, **TOP_LEFT)
    checks.solves(
        backend, Case(purpose="deterministic", problem=problem), device, gradients=GRADIENTS
    )


@pytest.mark.capability("streams")
def test_runs_on_the_current_stream(backend: str, lane: Lane, gpu: torch.device):
    """Inputs written late on a side stream are read after, not before, they are written."""
    problem = lane.problem(**TOP_LEFT)
    x = dense(problem, gpu)
    checks.run(backend, x, problem, gradients=GRADIENTS)  # compile, or skip
    late = Inputs(*(torch.full_like(t, torch.nan) for t in x))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, x, strict=True):
            target.copy_(source)
        q, k, v = with_gradients(late)
        o, lse = checks.attention(backend, q, k, v, is_causal=True, return_lse=True)
        grads = torch.autograd.grad((o, lse), (q, k, v), late[3:])
    torch.cuda.synchronize()
    got = checks.Outputs(o.detach(), lse.detach(), *grads)
    checks.compare(backend, got, x, problem, label="side stream")


@pytest.mark.capability("graphs")
def test_graph_capture_and_replay(backend: str, lane: Lane, gpu: torch.device):
    """Forward and backward recorded once, replayed on other numbers."""
    problem = lane.problem(**TOP_LEFT)
    first, second = (dense_from_seed(problem, gpu, seed) for seed in (0, 1))
    x = Inputs(*(t.clone() for t in first))

    def call() -> checks.Outputs:
        q, k, v = with_gradients(x)
        o, lse = checks.attention(backend, q, k, v, is_causal=True, return_lse=True)
        grads = torch.autograd.grad((o, lse), (q, k, v), x[3:])
        return checks.Outputs(o.detach(), lse.detach(), *grads)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for numbers in (first, second):
        for target, source in zip(x, numbers, strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        checks.compare(backend, got, x, problem, label="graph replay")


def dense_from_seed(problem: Problem, device: torch.device, seed: int) -> Inputs:
    return LAYOUTS["dense"](problem.inputs(device, seed))


@pytest.mark.capability("other_device")
def test_a_device_that_is_not_the_current_one(backend: str, lane: Lane, gpu: torch.device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    case = Case(purpose="other_device", problem=lane.problem(**TOP_LEFT))
    checks.solves(backend, case, other, gradients=GRADIENTS)


@pytest.mark.capability("linear_memory")
@pytest.mark.thorough
def test_memory_grows_linearly(backend: str, lane: Lane, gpu: torch.device):
    """Twice the length takes at most twice the memory, and a bit, beyond the inputs."""
    peaks = {}
    for seqlen in (4096, 8192, 16384):
        problem = lane.problem(seqlen, batch=1, num_heads=4)
        x = problem.inputs(gpu)
        q, k, v = with_gradients(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o = checks.attention(backend, q, k, v)
        torch.autograd.grad(o, (q, k, v), x.do)
        torch.cuda.synchronize()
        peaks[seqlen] = torch.cuda.max_memory_allocated() - before
        del o
    for seqlen in (4096, 8192):
        assert peaks[2 * seqlen] < 2.3 * peaks[seqlen], f"peak bytes by length: {peaks}"
