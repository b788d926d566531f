"""Canonical form of bash text: two commands with one canonical form do the same thing (docs/verifiers_shell.md).

`canonical` maps text to nested tuples, or to None where the text is not bash that it fully understands; then the caller
may only compare the text itself. The tree comes from tree-sitter-bash; nothing of it is dropped but comments, blank
space, statement separators and quoting that changes nothing. A word is a `str` if it is literal, else a tuple of parts:
    ("s", text) literal     ("g", char) active glob, brace, tilde or history character     ("v", name, quoted) variable
    ("x", text, quoted) any other expansion, verbatim     ("c", program, quoted) command substitution
    ("p", operator, program) process substitution
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from pivotrl.verifiers.bash_words import NotUnderstood, Word, decode_ansi_c, merge
from pivotrl.verifiers.shell_tools import normalise_command

Canonical = tuple[Any, ...]

MAX_BYTES = 100_000  # longer text is compared as text: the parser's error recovery is not linear
MAX_DEPTH = 100

_LANGUAGE = Language(tree_sitter_bash.language())
_BLANK = re.compile(rb"(?:[ \t\n]|\\\n)*")  # a carriage return is part of a word
# The grammar's scanner looks characters up in C's table of 256 and can crash on others, so it is shown a comma, a plain
# word character, for every byte beyond ASCII. Offsets stay; all text is taken from the original.
_ASCII = bytes(range(128)) + b"," * 128
_SEPARATORS = frozenset({";", "\n"})
# Where `;` and a newline only end a statement. Elsewhere (`for ((;;))`, `;;`) they are kept.
_STATEMENT_LISTS = frozenset(
    {
        "program",
        "compound_statement",
        "subshell",
        "do_group",
        "if_statement",
        "elif_clause",
        "else_clause",
        "while_statement",
        "for_statement",
        "case_item",
        "case_statement",
        "command_substitution",
        "process_substitution",
    }
)
_WORDS = frozenset(
    {
        "word",
        "number",
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "concatenation",
        "simple_expansion",
        "expansion",
        "command_substitution",
        "process_substitution",
        "arithmetic_expansion",
        "brace_expression",
        "extglob_pattern",
        "command_name",
    }
)


def is_empty(form: Canonical | None) -> bool:
    """True for text that runs nothing: blank space and comments."""
    return form == ("program",)


@lru_cache(maxsize=4096)
def canonical(text: str, interactive: bool = False, cwd: str | None = None) -> Canonical | None:
    """The canonical form, or None. Never raises.

    `interactive`: typed at a prompt, where `!` inside double quotes or bare is history expansion.
    `cwd`: working directory when known; a leading `cd <cwd> &&` then changes nothing and is dropped.
    """
    source = text.encode("utf-8", "surrogatepass")
    if len(source) > MAX_BYTES or b"\0" in source:
        return None
    root = Parser(_LANGUAGE).parse(source.translate(_ASCII)).root_node
    if root.has_error:
        return None
    try:
        form = _Walker(source, interactive).statements(root, 0)
    except (NotUnderstood, UnicodeDecodeError, ValueError, OverflowError):
        return None
    return _drop_known_cd(form, cwd) if cwd else form


def equivalent(expected: str, actual: str, interactive: bool = False, cwd: str | None = None) -> bool:
    """Whether two bash texts do the same thing; symmetric. Empty commands are equal only as text."""
    if expected == actual or _trimmed(expected) == _trimmed(actual):
        return True
    form = canonical(expected, interactive, cwd)
    return form is not None and not is_empty(form) and form == canonical(actual, interactive, cwd)


def _trimmed(text: str) -> str:
    """Without the blank space around it that bash does not see; what a backslash at the end quotes stays."""
    short = text.strip(" \t\n")
    escapes = len(short) - len(short.rstrip("\\"))
    return text.lstrip(" \t\n") if escapes % 2 else short


def _drop_known_cd(form: Canonical, cwd: str) -> Canonical:
    """`cd DIR && rest` -> `rest` for the first statement, where DIR is the working directory already."""
    if len(form) < 2 or not isinstance(form[1], tuple) or form[1][:1] != ("list",):
        return form
    parts = form[1][1:]
    directory = cwd.rstrip("/") or "/"
    if parts[1] != "&&" or parts[0] != ("command", (), normalise_command(("cd", directory)), ()):
        return form
    rest = parts[2:]
    return (form[0], rest[0] if len(rest) == 1 else ("list", *rest), *form[2:])


class _Walker:
    def __init__(self, source: bytes, interactive: bool) -> None:
        self.source = source
        self.interactive = interactive

    def text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode("utf-8", "surrogatepass")

    # Statements ---------------------------------------------------------------------------------------------------

    def statement(self, node: Node, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotUnderstood("too deep")
        kind = node.type
        if kind == "command":
            return self.command(node, depth)
        if kind == "redirected_statement":
            return self.redirected(node, depth)
        if kind in ("list", "pipeline"):
            return self.chain(node, depth)
        if kind == "variable_assignment":
            return self.assignment(node, depth)
        if kind in _WORDS:
            return self.word(node, depth)
        if kind in ("file_redirect", "herestring_redirect", "heredoc_redirect"):
            return ("redirects", *self.redirect(node, depth))
        if kind == "test_command" and self.source[node.start_byte : node.start_byte + 2] == b"[[":
            return ("verbatim", self.text(node))  # quoting changes patterns inside [[ ]]
        if not node.children:
            return (kind, self.text(node)) if node.is_named else kind
        if kind in _STATEMENT_LISTS or kind in _LOSSLESS:
            return self.statements(node, depth)
        return (kind, self.text(node))

    def statements(self, node: Node, depth: int) -> Canonical:
        """Any node as (type, children...), lossless but for blank space, comments and separators."""
        found: list[Any] = [node.type]
        for child in self.solid_children(node):
            if child.type == "comment":
                continue
            if not child.is_named and child.type in _SEPARATORS and node.type in _STATEMENT_LISTS:
                continue
            found.append(self.statement(child, depth + 1))
        return tuple(found)

    def solid_children(self, node: Node) -> list[Node]:
        """Children with nothing but blank space and line continuations between them."""
        children = node.children
        position = node.start_byte
        for child in children:
            self.check_blank(position, child.start_byte)
            position = child.end_byte
        self.check_blank(position, node.end_byte)
        return children

    def check_blank(self, start: int, end: int) -> None:
        if start < end and not _BLANK.fullmatch(self.source, start, end):
            raise NotUnderstood("text between nodes")

    def chain(self, node: Node, depth: int) -> Canonical:
        """`a && b || c` is left-associative: one flat sequence. `|&` is `2>&1 |`."""
        parts: list[Any] = []
        for child in self.solid_children(node):
            if child.type == "comment":
                continue
            if child.type == node.type and not parts:
                parts.extend(self.chain(child, depth + 1)[1:])
            elif child.type == "|&":
                parts[-1] = _push_redirects(parts[-1], ((">&", "2", "1"),))
                parts.append("|")
            else:
                parts.append(self.statement(child, depth + 1))
        return (node.type, *parts)

    def command(self, node: Node, depth: int) -> Canonical:
        assignments: list[Any] = []
        words: list[Word] = []
        redirects: list[Any] = []
        for child in self.solid_children(node):
            if child.type == "variable_assignment":
                assignments.append(self.assignment(child, depth + 1))
            elif child.type.endswith("_redirect"):
                redirects.extend(self.redirect(child, depth + 1))
            elif child.type in _WORDS:
                words.append(self.word(child, depth + 1))
            elif not child.is_named and not child.children:
                words.append((("x", self.text(child), False),))  # an operator of the grammar used as an argument
            else:
                raise NotUnderstood(child.type)
        return ("command", tuple(assignments), normalise_command(tuple(words)), _order_redirects(redirects))

    def redirected(self, node: Node, depth: int) -> Any:
        body: Any = ("command", (), (), ())
        redirects: list[Any] = []
        for child in self.solid_children(node):
            if child.type.endswith("_redirect"):
                redirects.extend(self.redirect(child, depth + 1))
            else:
                body = self.statement(child, depth + 1)
        return _push_redirects(body, tuple(redirects))

    def assignment(self, node: Node, depth: int) -> Canonical:
        parts: list[Any] = ["assign"]
        for child in self.solid_children(node):
            if child.type in _WORDS:
                parts.append(self.word(child, depth + 1, splits=False))
            else:
                parts.append(self.text(child))
        return tuple(parts)

    # Redirections -------------------------------------------------------------------------------------------------

    def redirect(self, node: Node, depth: int) -> list[Any]:
        """One redirection as (operator, descriptor, target); `&> f` becomes `> f 2>&1`."""
        if node.type == "heredoc_redirect":
            return self.heredoc(node, depth)
        descriptor, operator, targets = "", "", []
        for child in self.solid_children(node):
            if child.type == "file_descriptor":
                descriptor = self.text(child)
            elif child.type in _WORDS:
                targets.append(self.word(child, depth + 1))
            elif not operator and not child.is_named:
                operator = child.type
            else:
                raise NotUnderstood(child.type)
        if operator in ("&>", "&>>") and len(targets) == 1:
            return [(operator[1:], "1", targets[0]), (">&", "2", "1")]
        standard = "0" if operator.startswith("<") else "1"
        return [(operator, descriptor or standard, *targets)]

    def heredoc(self, node: Node, depth: int) -> list[Any]:
        """A here-document by its text; its delimiter is a name that nobody sees."""
        operator, descriptor, start, body, extras, redirects = "<<", "0", "", "", [], []
        for child in node.children:
            if child.type in ("<<", "<<-"):
                operator = child.type
            elif child.type == "file_descriptor":
                descriptor = self.text(child)
            elif child.type == "heredoc_start":
                start = self.text(child)
            elif child.type == "heredoc_body":
                body = self.text(child)
            elif child.type in ("file_redirect", "herestring_redirect"):
                redirects.extend(self.redirect(child, depth + 1))
            elif child.type != "heredoc_end":
                extras.append(self.statement(child, depth + 1))
        if operator == "<<-":
            body = re.sub(r"(?m)^\t+", "", body)
        quoted = any(c in start for c in "'\"\\")
        plain = quoted or not any(c in body for c in "$`\\")
        document: Word = body if plain else (("x", body, True),)
        return [("<<", descriptor, document, *extras), *redirects]

    # Words --------------------------------------------------------------------------------------------------------

    def word(self, node: Node, depth: int, splits: bool = True) -> Word:
        parts: list[tuple[Any, ...]] = []
        self.word_parts(node, depth, not splits, parts)
        return merge(parts)

    def word_parts(self, node: Node, depth: int, quoted: bool, parts: list[tuple[Any, ...]]) -> None:
        if depth > MAX_DEPTH:
            raise NotUnderstood("too deep")
        kind, text = node.type, self.text(node)
        if kind in ("word", "number", "brace_expression") or (not node.is_named and not node.children):
            self.bare(text, parts)
        elif kind == "raw_string":
            parts.append(("s", text[1:-1]))
        elif kind == "ansi_c_string":
            parts.append(("s", decode_ansi_c(text[2:-1])))
        elif kind == "string":
            self.double_quoted(node, depth, parts)
        elif kind in ("concatenation", "command_name"):
            if "{" in text and ("," in text or ".." in text):
                parts.append(("x", text, quoted))  # perhaps a brace expansion: verbatim
                return
            for child in node.children:
                self.word_parts(child, depth + 1, quoted, parts)
            if sum(c.end_byte - c.start_byte for c in node.children) != node.end_byte - node.start_byte:
                raise NotUnderstood("text inside a word")
        else:
            parts.append(self.expansion(node, depth, quoted))

    def bare(self, text: str, parts: list[tuple[Any, ...]]) -> None:
        """An unquoted word: backslashes quote the next character, some characters are active."""
        if "{" in text and ("," in text or ".." in text):
            parts.append(("x", text, False))
            return
        active = "*?[]!" if self.interactive else "*?[]"
        i = 0
        while i < len(text):
            char = text[i]
            if char == "\\" and i + 1 < len(text):
                if text[i + 1] != "\n":
                    parts.append(("s", text[i + 1]))
                i += 2
                continue
            if char == "~" and i == 0 and not parts and (len(text) == 1 or text[1] == "/"):
                parts.append(("v", "HOME", True))  # ~/x is "$HOME"/x: neither is split
            elif char in active or (char == "~" and (i == 0 or text[i - 1] in ":=")):
                parts.append(("g", char))
            else:
                parts.append(("s", char))
            i += 1

    def double_quoted(self, node: Node, depth: int, parts: list[tuple[Any, ...]]) -> None:
        position, end = node.start_byte + 1, node.end_byte - 1
        parts.append(("s", ""))
        for child in node.children:
            if child.type == '"' and child.start_byte in (node.start_byte, end):
                continue
            if child.type == "string_content" or not child.is_named:
                continue
            self.quoted_text(position, child.start_byte, parts)
            parts.append(self.expansion(child, depth, True))
            position = child.end_byte
        self.quoted_text(position, end, parts)

    def quoted_text(self, start: int, end: int, parts: list[tuple[Any, ...]]) -> None:
        text = self.source[start:end].decode("utf-8", "surrogatepass")
        text = re.sub(r"\\(\n|[$`\"\\])", lambda m: "" if m[1] == "\n" else m[1], text)
        if self.interactive and "!" in text:
            parts.append(("x", text, True))
        elif text:
            parts.append(("s", text))

    def expansion(self, node: Node, depth: int, quoted: bool) -> tuple[Any, ...]:
        text = self.text(node)
        if match := re.fullmatch(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])|\$\{(\w+)\}", text, re.ASCII):
            return ("v", match[1] or match[2], quoted)
        if node.type == "command_substitution" and (text.startswith("$(") or "\\" not in text):
            program = self.statements(node, depth + 1)[1:]
            if program[:1] in (("$(",), ("`",)) and program[-1:] in ((")",), ("`",)):
                return ("c", program[1:-1], quoted)
        if node.type == "process_substitution":
            return ("p", *self.statements(node, depth + 1)[1:])
        return ("x", text, quoted)


_LOSSLESS = frozenset(
    {"negated_command", "declaration_command", "unset_command", "test_command", "unary_expression"}
) | {
    "binary_expression",
    "function_definition",
    "parenthesized_expression",
    "array",
}


def _push_redirects(body: Any, redirects: tuple[Any, ...]) -> Any:
    """Redirections belong to the last command of a list or pipeline, as in bash's own grammar."""
    if not redirects:
        return body
    if body[0] in ("list", "pipeline", "negated_command"):
        return (*body[:-1], _push_redirects(body[-1], redirects))
    if body[0] == "command":
        return (*body[:3], _order_redirects([*body[3], *redirects]))
    return ("redirected", body, _order_redirects(list(redirects)))


def _order_redirects(redirects: list[Any]) -> tuple[Any, ...]:
    """Order matters (`>f 2>&1`), except for a single here-document on standard input, which cannot fail."""
    documents = [r for r in redirects if r[0] == "<<" and r[1] == "0"]
    if len(documents) != 1 or any(r[0].startswith("<") and r[0] != "<<" for r in redirects):
        return tuple(redirects)
    return (*documents, *(r for r in redirects if r is not documents[0]))
