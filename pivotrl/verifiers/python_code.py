"""Whether two pieces of Python are the same program: comments, blank lines and formatting left out."""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize


def same_python(a: str, b: str) -> bool:
    """Equal syntax trees; for pieces that are no program, equal tokens. Strings (docstrings too) are code. Total."""
    if a == b:
        return True
    tree_a, tree_b = _tree(a), _tree(b)
    if (tree_a is None) != (tree_b is None):
        return False
    if tree_a is not None:
        return tree_a == tree_b
    tokens = _tokens(a)
    return tokens is not None and tokens == _tokens(b)


def _tree(source: str) -> str | None:
    try:
        return ast.dump(ast.parse(textwrap.dedent(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _tokens(source: str) -> list[tuple[int, str]] | None:
    """Tokens without comments and layout; None where they end before the text does."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
    found: list[tuple[int, str]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline):
            if token.type not in ignored:
                layout = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
                found.append((token.type, "" if layout else token.string))
    except tokenize.TokenError as error:
        if "EOF" not in str(error):
            return None
    except (SyntaxError, ValueError, RecursionError):
        return None
    return found
