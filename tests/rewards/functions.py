"""Functions that a config can name. Importable by worker processes."""


def ends_with(text, answer):
    """Correct where the text ends with the boxed answer; None for an empty text."""
    return float(text.endswith(f"\\boxed{{{answer}}}")) if text else None


def length(text, answer):
    """Characters of the text."""
    return len(text)
