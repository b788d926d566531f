"""Shell actions: what is equal, what is not, Terminus batches, and all recorded turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recorded_turns import call, recorded_turns, terminus, turn

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall
from pivotrl.verifiers.bash_ast import canonical, equivalent
from pivotrl.verifiers.shell import ShellVerifier
from pivotrl.verifiers.shell_tables import TOOLS
from pivotrl.verifiers.tool_name import ToolNameVerifier

SAME = [
    # blank space, quoting, separators, comments
    ("pytest  -q   tests", "pytest -q tests"),
    ("echo 'a b'", 'echo "a b"'),
    ("echo a\\ b", "echo 'a b'"),
    ("echo $'a\\tb'", "echo 'a\tb'"),
    ("ls;", "ls"),
    ("ls\n", "ls   # list"),
    ("a; b", "a\nb"),
    ("ls \\\n -l", "ls -l"),
    ("echo ${x}", "echo $x"),
    ("X=$y", 'X="$y"'),
    ("for i in 1 2; do echo $i; done", "for i in 1 2\ndo\n  echo ${i}\ndone"),
    ("if true; then a; fi", "if true\nthen\na\nfi"),
    ("find . -name x -exec rm {} \\;", "find . -name x -exec rm '{}' ';'"),
    # options of known tools
    ("ls -la", "ls -l -a"),
    ("ls -la", "ls -al ."),
    ("ls -l src", "ls src -l"),
    ("rm -rf build", "rm --recursive --force build"),
    ("rm -R a", "rm -r -- a"),
    ("grep -rn foo .", "grep foo -n -r ."),
    ("grep -A 3 x f", "grep -A3 x f"),
    ("grep -i --include='*.py' -r x .", "grep -r -i --include '*.py' x ."),
    ("head -5 f", "head -n 5 f"),
    ("head f", "head --lines=10 f"),
    ("tail -n5 f", "tail --lines 5 f"),
    ("mkdir -p a/b/", "mkdir --parents a/b"),
    ("tar xzf a.tgz", "tar -z -x -f a.tgz"),
    ("sed -ne p f", "sed -n -e p f"),
    ("git commit -am x", "git commit -a --message=x"),
    ("git log --oneline -5", "git log -n 5 --oneline"),
    ("python -m pytest -q -x t.py", "python -m pytest -xq ./t.py"),
    ("pytest --tb=short -q", "pytest -q --tb short"),
    ("apt-get install -y x", "apt-get -y install x"),
    ("pip install -U -q x", "pip install --quiet --upgrade x"),
    ("sudo ls -la", "sudo ls -l -a"),
    ("cat f | sort -n -r", "cat f | sort -rn"),
    ("echo $(ls -la)", "echo `ls -al`"),
    # paths
    ("cat ./x", "cat x"),
    ("cat a//b", "cat a/./b"),
    ("cat ~/x", 'cat "$HOME/x"'),
    ("cd /r/ && ls", "cd /r && ls"),
    # redirections written otherwise
    ("a &> f", "a > f 2>&1"),
    ("a |& b", "a 2>&1 | b"),
    ("a 1> f", "a >f"),
    ("cat > f << 'EOF'\nhi $x\nEOF\n", "cat <<'X' > f\nhi $x\nX"),
    ("cat <<EOF\nhi\nEOF", "cat <<'EOF'\nhi\nEOF"),
    ("echo café  日本 '\U0001f600'", 'echo "café" 日本 \U0001f600'),
]

DIFFERENT = [
    ("cp a b", "cp b a"),
    ("rm -rf a b", "rm -rf b a"),
    ("rm -rf /", "rm -rf ./"),
    ("rm -rf /", "rm -rf //"),
    ("rm -rf /", "rm -rf /*"),
    ("rm -rf /", "rm -fr /"),  # equal to nothing but itself
    ("rm -rf / --no-preserve-root", "pytest tests/a.py"),
    ("rm -rf x", "rm -rf x/"),
    ("ls -i", "ls -l"),
    ("ls", "ls a"),
    ("ls -la a", "ls -la a b"),
    ("rm -f -i a", "rm -i -f a"),
    ("ls -S -t", "ls -t -S"),
    ("sed -in p f", "sed -ni p f"),
    ("head -n 5 f", "head -c 5 f"),
    ("head -n 5 f", "head -n 6 f"),
    ("pytest -v", "pytest -vv"),
    ("diff -N --unified 1 a b", "diff a b --unified 1 -N"),  # takes a number only as --unified=1
    ("tail -f -F a", "tail -F -f a"),
    ("grep foo f", "grep Foo f"),
    ("grep x ./f", "grep ./x f"),
    ("grep -F a.b f", "grep -E a.b f"),
    ("grep a -r -- -b", "grep -r a -b"),
    ("git diff main", "git diff -- main"),
    ("python -c 'a' -x", "python -x -c a"),
    ("find . -name x -o -name y -delete", "find . -name y -o -name x -delete"),
    ("ls $x -l", "ls -l $x"),  # $x may hold `--`
    ("xargs ls", "xargs ls ."),
    ("tar -c -f a.tar -C d x", "tar -c -f a.tar x -C d"),
    ("FOO=1 pytest", "pytest"),
    ("FOO=1 pytest", "FOO=2 pytest"),
    ("A=1 B=$A c", "B=$A A=1 c"),
    ("cd /r && ls", "ls"),
    ("cd /r && ls", "cd /s && ls"),
    ("cd /r && rm -rf src", "cd /r && ls src"),
    ("cd /r && ls", "cd /r; ls"),
    ("a && b", "a; b"),
    ("a && b", "a || b"),
    ("a && b", "b && a"),
    ("a | b", "b | a"),
    ("a | b", "a; b"),
    ("a &", "a"),
    ("! a", "a"),
    ("(cd x; ls)", "cd x; ls"),
    ("./run.sh", "run.sh"),
    ("a > f", "a >> f"),
    ("a > f", "a < f"),
    ("a > f", "a 2> f"),
    ("a > f 2>&1", "a 2>&1 > f"),
    ("cd a && b > f", "{ cd a && b; } > f"),
    ("cat <<E\n$x\nE", "cat <<'E'\n$x\nE"),
    ("cat <<E\na  b\nE", "cat <<E\na b\nE"),
    ('echo "$x"', "echo $x"),
    ("echo '$x'", 'echo "$x"'),
    ("echo $(a)", "echo '$(a)'"),
    ('echo "$(a)"', "echo $(a)"),
    ("echo $(a)", "echo $(b)"),
    ("diff <(a) <(b)", "diff <(b) <(a)"),
    ("cat *.py", "cat '*.py'"),
    ("cat ?", "cat '?'"),
    ("echo {a,b}", "echo '{a,b}'"),
    ("cat ~/x", "cat '~/x'"),
    ("cat ~/x", "cat $HOME/x"),
    ("echo 'a  b'", "echo 'a b'"),
    ("echo ''", "echo"),
    ("[[ $a =~ 'x.' ]]", "[[ $a =~ x. ]]"),
    ("[ -f a ]", "[ -d a ]"),
    ("case $x in a) b;; esac", "case $x in c) b;; esac"),
    ("for i in 1 2; do a; done", "for i in 2 1; do a; done"),
    ("while a; do b; done", "until a; do b; done"),
    ("f() { a; }", "f() { b; }"),
    ("A=(1 2)", "A=(2 1)"),
    ("A=1", "A+=1"),
    ("echo café", "echo cafè"),
    ("echo 日", "echo ,,,"),
    ("ls '", "ls"),
    ("", "# nothing"),
    ("pytest", ""),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_meaning_preserved(a: str, b: str) -> None:
    assert equivalent(a, b)
    assert equivalent(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_meaning_broken(a: str, b: str) -> None:
    assert not equivalent(a, b)
    assert not equivalent(b, a)


def test_no_two_rows_of_the_table_are_mixed_up() -> None:
    forms = [canonical(a) for a, _ in SAME]
    for i, a in enumerate(forms):
        for j, b in enumerate(forms):
            if a == b and i != j:
                assert SAME[i][0].split()[0].rstrip(";") == SAME[j][0].split()[0].rstrip(";")


def test_an_option_is_in_one_order_group_only() -> None:
    for name, known in TOOLS.items():
        grouped = [option for group in known.groups for option in group]
        assert len(grouped) == len(set(grouped)), name
        options = {*known.flags.values(), *known.values.values(), *known.attached.values()}
        assert set(grouped) | known.counted | known.positional | known.final <= options, name


# Public verifiers' weaknesses (peers.md 0b), bash rows: all fall ----------------------------------

PEERS = [
    ("pytest tests/a.py", '{"command": "ls'),
    ("pytest -q", "not json"),
    ("pytest -q", ""),
    ("pytest -q", "rm -rf /"),
    ("rm -rf build", ""),
    ("cd /repo && rm -rf src", "cd /repo && ls src"),
    ("cp a b", "cp b a"),
    ("pytest tests/a.py", "rm -rf / --no-preserve-root"),
    # documented: an assignment before a command is part of it (false negative in the name of safety)
    ("pytest tests/a.py", "PYTHONPATH=. pytest tests/a.py"),
    ("pytest tests/a.py", "FOO=1 pytest tests/a.py"),
]


@pytest.mark.parametrize(("expected", "actual"), PEERS)
def test_public_weaknesses(expected: str, actual: str) -> None:
    verifier = ShellVerifier({})
    t = turn(call("bash", command=expected))
    assert verifier.verify(t, call("bash", command=actual)).reward == 0.0
    assert verifier.verify(t, call("bash")).reward == 0.0
    assert verifier.verify(t, call("bash", command=expected)).reward == 1.0
    assert verifier.verify(t, call("rm", command=expected)).reward == 0.0


def test_malformed_and_odd_arguments_score_0() -> None:
    verifier = ShellVerifier({})
    t = turn(call("bash", command="pytest -q"))
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    odd: list[Any] = [
        None,
        1,
        True,
        [],
        ["pytest -q", 1],
        {"command": "pytest -q"},
        10**5000,
        float("nan"),
        deep,
        "\ud800",
        "\0",
    ]
    for value in odd:
        assert verifier.verify(t, call("bash", command=value)).reward == 0.0
        assert verifier.verify(t, call("bash", command="pytest -q", extra=value)).reward == 0.0
    assert verifier.verify(t, Action(tool_calls=(ToolCall("bash", ["pytest -q"]),))).reward == 0.0  # type: ignore[arg-type]
    broken = Action(tool_calls=(ToolCall("bash", {"command": "pytest -q"}),), problems=("unclosed",))
    assert verifier.verify(t, broken).reward == 0.0


def test_surplus_and_missing_calls_score_0() -> None:
    verifier = ShellVerifier({})
    one, two = ToolCall("bash", {"command": "ls"}), ToolCall("bash", {"command": "pwd"})
    t = turn(Action(tool_calls=(one, two)))
    assert verifier.verify(t, Action(tool_calls=(one, two))).reward == 1.0
    for calls in [(one,), (two, one), (one, two, two), (one, one), ()]:
        assert verifier.verify(t, Action(tool_calls=calls)).reward == 0.0


def test_text_turns_are_never_constant_1() -> None:
    verifier = ShellVerifier({})
    t = turn(Action(text="All tests pass now."))
    assert verifier.verify(t, Action(text="")).reward == 0.0
    assert verifier.verify(t, call("bash", command="ls")).reward == 0.0
    assert verifier.verify(t, Action(text="Something else.")).reward is None
    assert verifier.verify(t, Action(text="All tests  pass now.")).reward == 1.0


@pytest.mark.parametrize(
    ("observation", "cwd"),
    [("done\n(Open file: n/a)\n(Current directory: /r)\nbash-$", "auto"), ("a\nroot@box:/r# ", "auto"), ("", "/r/")],
)
def test_cd_into_the_known_working_directory_is_a_no_op(observation: str, cwd: str) -> None:
    verifier = ShellVerifier({"cwd": cwd})
    state = [{"role": "tool", "content": observation}]
    t = turn(call("bash", command="ls"), state)
    assert verifier.verify(t, call("bash", command="cd /r && ls")).reward == 1.0
    assert verifier.verify(t, call("bash", command="cd /r/ && ls")).reward == 1.0
    assert verifier.verify(t, call("bash", command="cd /s && ls")).reward == 0.0
    assert ShellVerifier({"cwd": None}).verify(t, call("bash", command="cd /r && ls")).reward == 0.0


def test_tool_and_field_options() -> None:
    t = turn(call("my_shell", line="ls -la"))
    assert ShellVerifier({}).verify(t, call("my_shell", line="ls -al")).reward == 0.0
    assert ShellVerifier({"tool": {"my_shell": "line"}}).verify(t, call("my_shell", line="ls -al")).reward == 1.0
    argv = turn(call("shell", command=["bash", "-lc", "ls -la"]))
    assert ShellVerifier({}).verify(argv, call("shell", command=["bash", "-lc", "ls -al"])).reward == 1.0
    assert ShellVerifier({}).verify(argv, call("shell", command=["sh", "-c", "ls -la"])).reward == 0.0
    assert ShellVerifier({}).verify(argv, call("shell", command=["bash", "-lc", "ls"])).reward == 0.0
    for options in ({"tol": "x"}, {"tool": 3}, {"cwd": 1}):
        with pytest.raises(UserError):
            ShellVerifier(options)


def test_timing_arguments_are_free_and_others_are_not() -> None:
    t = turn(call("bash", command="make", timeout=5, background=True))
    assert ShellVerifier({}).verify(t, call("bash", command="make", timeout=9, background=True)).reward == 1.0
    assert ShellVerifier({}).verify(t, call("bash", command="make", background=1)).reward == 0.0
    assert ShellVerifier({}).verify(t, call("bash", command="make")).reward == 0.0


# Recorded turns -----------------------------------------------------------------------------------

TURNS = recorded_turns()
needs_data = pytest.mark.skipif(not TURNS, reason="shared trajectories are absent (PIVOTRL_SHARED)")


def shell_commands() -> list[str]:
    fields = [(c.arguments.get("command"), c.name) for t in TURNS for c in t.demonstration.tool_calls]
    return sorted({c for c, name in fields if isinstance(c, str) and name in ("bash", "terminal")})


@needs_data
def test_the_demonstration_is_always_accepted() -> None:
    assert len(TURNS) > 200
    for verifier in (ShellVerifier({}), ToolNameVerifier({})):
        for t in TURNS:
            if t.demonstration.tool_calls:
                assert verifier.verify(t, t.demonstration).reward == 1.0, t.id


@needs_data
def test_no_other_recorded_action_is_accepted_unless_it_reads_the_same() -> None:
    """Every pair of distinct recorded commands: nothing is equal that differs in more than blank space and quotes."""
    commands = shell_commands()
    assert len(commands) > 80
    bare = {c: sorted(c.replace('"', " ").replace("'", " ").replace("./", " ").split()) for c in commands}
    for i, a in enumerate(commands):
        for b in commands[i + 1 :]:
            assert not equivalent(a, b) or bare[a] == bare[b], (a, b)


PRESERVING = ["  {}", "{}\n", "\n\n{}", "# first\n{}"]
BREAKING = [
    "! {}",
    "FOO=1 {}",
    "{}x",
    "echo {}",
    "sudo {}",
    "true && {}",
    "true; {}",
    "true | {}",
    "cd /nowhere && {}",
    "({})",
    "{} && id",
]


@needs_data
def test_mutations_of_recorded_commands() -> None:
    for command in shell_commands():
        if canonical(command) is None:
            continue
        for template in PRESERVING:
            assert equivalent(command, template.replace("{}", command)), (template, command)
        for template in BREAKING:
            assert not equivalent(command, template.replace("{}", command)), (template, command)


# Properties ---------------------------------------------------------------------------------------

SHELL_TEXT = st.lists(
    st.sampled_from(
        [*"abx$\"'`\\ \n\t;&|<>(){}[]!*?~#=-/.0", "&&", "||", "<<", "ls ", "rm -rf ", "$(", "${", "EOF\n", "-la "]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=60), SHELL_TEXT), st.one_of(st.text(max_size=60), SHELL_TEXT))
@example("", "\x85")  # white space to Python, a command to bash
def test_total_reflexive_and_symmetric(a: str, b: str) -> None:
    assert equivalent(a, a)
    assert equivalent(a, b) == equivalent(b, a)
    verifier, t = ShellVerifier({}), turn(call("bash", command=a))
    assert verifier.verify(t, t.demonstration).reward == 1.0
    assert verifier.verify(t, call("bash", command=b)).reward == float(equivalent(a, b))
    keys = turn(terminus(a))
    assert ShellVerifier({}).verify(keys, terminus(a)).reward == 1.0
    assert ShellVerifier({}).verify(keys, Action(text=b)).reward == 0.0


@settings(max_examples=300)
@given(SHELL_TEXT)
def test_an_equal_command_has_the_same_visible_characters(text: str) -> None:
    """Blank space around operators may go; nothing that is not blank, quote or separator may."""
    changed = text + "z"
    assert not equivalent(text, changed) or "#" in text


def test_deep_and_long_text_is_compared_as_text() -> None:
    for text in [
        "(" * 5000 + "a" + ")" * 5000,
        "$(" * 300 + "a" + ")" * 300,
        "a " * 100_000,
        "{ " * 2000,
        "if " * 2000,
    ]:
        assert equivalent(text, text)
        assert not equivalent(text, text + "b")
