def sections(part, card):
    return []
