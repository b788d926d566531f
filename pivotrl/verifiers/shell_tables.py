"""What is known of the options of common tools: which bundle, alias, commute, take values or decide by order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tool:
    """Options of one tool. `flags`, `values`, `attached` map each spelling ("l", "all") to one name; values need an
    argument, attached options take one only when joined (`-i.bak`, `--color=auto`)."""

    flags: dict[str, str]
    values: dict[str, str]
    attached: dict[str, str]
    groups: tuple[frozenset[str], ...]  # options whose order among themselves decides
    counted: frozenset[str]  # repetition means more (-vv)
    positional: frozenset[str]  # options whose place among the operands decides
    final: frozenset[str]  # the rest of the line belongs to this option's program (python -m)
    paths: str  # which operands are paths: "all", "rest" (all but the first), "first", "none"
    pattern_options: frozenset[str]  # with one of these there is no leading pattern: all operands are paths
    stop: bool  # options end at the first operand
    number: str  # option meant by -5
    defaults: dict[str, str] = field(default_factory=dict)
    default_operand: str = ""  # operand meant when there is none
    directories: bool = False  # operands are directories: a trailing slash says nothing
    dashes: bool = True  # `--` only ends the options (git diff: it also tells paths from revisions)


def _names(spec: str) -> dict[str, str]:
    """ "l a:all r:R:recursive" -> every spelling to the first of its item."""
    return {name: item.split(":")[0] for item in spec.split() for name in item.split(":")}


def tool(
    flags: str = "",
    values: str = "",
    attached: str = "",
    groups: str = "",
    counted: str = "",
    positional: str = "",
    final: str = "",
    paths: str = "all",
    pattern_options: str = "",
    stop: bool = False,
    number: str = "",
    defaults: dict[str, str] | None = None,
    default_operand: str = "",
    directories: bool = False,
    dashes: bool = True,
) -> Tool:
    return Tool(
        flags=_names(flags),
        values=_names(values),
        attached=_names(attached),
        groups=tuple(frozenset(group.split(",")) for group in groups.split()),
        counted=frozenset(counted.split()),
        positional=frozenset(positional.split()),
        final=frozenset(final.split()),
        paths=paths,
        pattern_options=frozenset(pattern_options.split()),
        stop=stop,
        number=number,
        defaults=defaults or {},
        default_operand=default_operand,
        directories=directories,
        dashes=dashes,
    )


def _head(flags: str, groups: str) -> Tool:
    return tool(flags, values="n:lines c:bytes", number="n", groups=groups, defaults={"n": "10"})


_CHMOD = tool("R:recursive v:verbose f:silent:quiet c:changes", paths="rest", groups="c,v")
_SUM = tool("c:check b:binary t:text", groups="b,t")
_PYTHON = tool("u B s S E I O q b", values="m c W X", counted="O b", final="m c", paths="first", stop=True)
_PIP_INSTALL = tool(
    "U:upgrade q:quiet v:verbose user no-deps no-cache-dir break-system-packages pre I:ignore-installed "
    "force-reinstall",
    values="r:requirement e:editable i:index-url extra-index-url t:target c:constraint f:find-links",
    groups="r,e,c",
    counted="q v",
    paths="none",
)

TOOLS: dict[str, Tool] = {
    "ls": tool(
        "a:all A:almost-all l h:human-readable R:recursive t S X r:reverse 1 C x m d:directory F i:inode s:size "
        "n:numeric-uid-gid "
        "g G:no-group o L:dereference H p Q:quote-name k group-directories-first full-time",
        attached="color",
        groups="a,A l,1,C,x,m,g,n,o,full-time t,S,X L,H F,p h,k",
        default_operand=".",
    ),
    "cat": tool(
        "n:number b:number-nonblank E:show-ends A:show-all s:squeeze-blank T:show-tabs v:show-nonprinting e t",
        groups="b,n",
    ),
    "head": _head("q:quiet:silent v:verbose z:zero-terminated", "n,c q,v"),
    "tail": _head("q:quiet:silent v:verbose z:zero-terminated f F", "n,c q,v f,F"),
    "wc": tool("l:lines w:words c:bytes m:chars L:max-line-length"),
    "sort": tool(
        "n:numeric-sort r:reverse u:unique h:human-numeric-sort f:ignore-case b:ignore-leading-blanks "
        "d:dictionary-order "
        "g:general-numeric-sort M:month-sort V:version-sort s:stable z:zero-terminated c:check m:merge",
        values="k:key t:field-separator o:output",
        groups="n,h,g,M,V",
    ),
    "uniq": tool("c:count d:repeated u:unique i:ignore-case", values="f:skip-fields s:skip-chars w:check-chars"),
    "cut": tool("s:only-delimited complement", values="d:delimiter f:fields c:characters b:bytes output-delimiter"),
    "tr": tool("d:delete c:C:complement s:squeeze-repeats t:truncate-set1", paths="none", stop=True),
    "mkdir": tool("p:parents v:verbose", values="m:mode", directories=True),
    "rmdir": tool("p:parents v:verbose", directories=True),
    "cd": tool("P L e", groups="P,L", directories=True, stop=True),
    "rm": tool("r:R:recursive f:force v:verbose d:dir i I", groups="f,i,I"),
    "cp": tool(
        "r:R:recursive a:archive f:force n:no-clobber i:interactive v:verbose p L:dereference P:no-dereference H d "
        "l:link "
        "s:symbolic-link T:no-target-directory u",
        values="t:target-directory",
        groups="i,n,f,u L,P,H,d,a,p l,s",
    ),
    "mv": tool(
        "f:force n:no-clobber i:interactive u v:verbose T:no-target-directory", "t:target-directory", groups="f,n,i,u"
    ),
    "ln": tool(
        "s:symbolic f:force n:no-dereference v:verbose T:no-target-directory r:relative i:interactive", groups="f,i"
    ),
    "touch": tool("a m c:no-create h:no-dereference", values="d:date r:reference t", groups="d,r,t a,m"),
    "chmod": _CHMOD,
    "chown": _CHMOD,
    "chgrp": _CHMOD,
    "du": tool(
        "s:summarize h:human-readable a:all c:total k m b:bytes L:dereference x:one-file-system",
        values="d:max-depth",
        groups="h,k,m,b s,a,d",
        default_operand=".",
    ),
    "df": tool("h:human-readable k T:print-type a:all i:inodes P:portability H:si", groups="h,k,H"),
    "grep": tool(
        "i:ignore-case v:invert-match n:line-number r:recursive R:dereference-recursive l:files-with-matches "
        "c:count x:line-regexp "
        "L:files-without-match w:word-regexp o:only-matching q:quiet:silent s:no-messages h:no-filename "
        "H:with-filename a:text "
        "E:extended-regexp F:fixed-strings P:perl-regexp G:basic-regexp z:null-data Z:null b:byte-offset",
        values="A:after-context B:before-context C:context m:max-count e:regexp f:file include exclude exclude-dir",
        attached="color:colour",
        groups="E,F,P,G h,H r,R l,L,c,q A,B,C include,exclude,exclude-dir e,f w,x",
        number="C",
        paths="rest",
        pattern_options="e f",
    ),
    "sed": tool(
        "n:quiet:silent E:r:regexp-extended s:separate z:null-data u:unbuffered",
        values="e:expression f:file",
        attached="i:in-place",
        groups="e,f",
        paths="rest",
        pattern_options="e f",
    ),
    "awk": tool(values="F:field-separator v:assign f:file", groups="F,v,f", paths="none", stop=True),
    "diff": tool(
        "r:recursive q:brief N:new-file w:ignore-all-space b:ignore-space-change i:ignore-case a:text "
        "B:ignore-blank-lines "
        "u s:report-identical-files",
        values="U",
        attached="unified",
        groups="u,U,unified,q",
    ),
    "tree": tool("a d f h s C i", values="L I P", groups="I,P f,i", default_operand="."),
    "tee": tool("a:append i:ignore-interrupts"),
    "which": tool("a", paths="none"),
    "stat": tool("L:dereference f:file-system t:terse", values="c:format", groups="c,t"),
    "file": tool("b:brief i:mime L:dereference"),
    "readlink": tool("f:canonicalize e:canonicalize-existing m:canonicalize-missing n:no-newline", groups="f,e,m"),
    "hexdump": tool("C:canonical v:no-squeezing", values="n:length s:skip"),
    "md5sum": _SUM,
    "sha1sum": _SUM,
    "sha256sum": _SUM,
    "date": tool("u:utc:universal", values="d:date", paths="none"),
    "jq": tool(
        "r:raw-output c:compact-output n:null-input e:exit-status s:slurp S:sort-keys M:monochrome-output", paths="rest"
    ),
    "tar": tool(
        "x:extract:get c:create t:list z:gzip:gunzip j:bzip2 J:xz v:verbose k:keep-old-files p:preserve-permissions "
        "O:to-stdout",
        values="f:file C:directory strip-components exclude",
        counted="v",
        positional="C exclude",
        paths="none",  # an archive keeps the names as they are given
    ),
    "unzip": tool("o n l q v", values="d", groups="o,n l,v", counted="q", positional=""),
    "python": _PYTHON,
    "python3": _PYTHON,
    "pytest": tool(
        "q:quiet v:verbose x:exitfirst s:capture=no l:showlocals lf:last-failed ff:failed-first co:collect-only "
        "no-header",
        values="k m n:numprocesses p W:pythonwarnings tb maxfail durations timeout rootdir ignore deselect junitxml",
        attached="r cov",
        counted="q v",
        groups="x,maxfail lf,ff ignore,deselect",
    ),
    "pip": tool("V:version", values="", paths="none", stop=True),
    "apt-get": tool("y:yes:assume-yes q:quiet f:fix-broken no-install-recommends", counted="q", paths="none"),
    "curl": tool(
        "s:silent S:show-error L:location k:insecure f:fail i:include I:head O:remote-name v:verbose g:globoff "
        "compressed",
        values="o:output X:request H:header d:data u:user A:user-agent F:form b:cookie c:cookie-jar w:write-out "
        "m:max-time "
        "data-raw data-binary data-urlencode connect-timeout retry",
        groups="d,data-raw,data-binary,data-urlencode,F o,O",
        positional="O o",
        paths="none",
    ),
    "wget": tool("q:quiet c:continue", values="O:output-document P:directory-prefix", groups="O,P", paths="none"),
    "git status": tool("s:short b:branch porcelain long", attached="porcelain", groups="s,porcelain,long"),
    "git log": tool(
        "oneline graph all stat p:patch:u name-only name-status decorate no-merges reverse follow",
        values="n:max-count author since until format grep",
        number="n",
        groups="oneline,format p,stat,name-only,name-status",
        paths="none",
        dashes=False,
    ),
    "git diff": tool(
        "cached:staged stat name-only name-status w:ignore-all-space",
        groups="stat,name-only,name-status",
        paths="none",
        dashes=False,
    ),
    "git show": tool(
        "stat name-only name-status oneline",
        values="format",
        groups="stat,name-only,name-status oneline,format",
        paths="none",
        dashes=False,
    ),
    "git add": tool("A:all u:update f:force v:verbose n:dry-run p:patch", groups="A,u"),
    "git commit": tool(
        "a:all q:quiet v:verbose amend no-edit n:no-verify s:signoff allow-empty", values="m:message author date"
    ),
    "git branch": tool(
        "a:all r:remotes v:verbose D d:delete m:move M f:force",
        counted="v",
        groups="a,r d,D,m,M",
        paths="none",
        dashes=False,
    ),
    "git checkout": tool("f:force q:quiet t:track", values="b B", groups="b,B", paths="none", dashes=False),
    "git rm": tool("r f:force q:quiet cached"),
    "git reset": tool("hard soft mixed q:quiet", groups="hard,soft,mixed", paths="none", dashes=False),
    "git clone": tool(
        "q:quiet v:verbose recursive:recurse-submodules single-branch",
        values="b:branch depth",
        paths="none",
        dashes=False,
    ),
    "pip install": _PIP_INSTALL,
    "pip show": tool("f:files v:verbose", paths="none"),
    "pip list": tool("o:outdated u:uptodate", values="format", paths="none"),
    "pip uninstall": tool("y:yes", values="r:requirement", paths="none"),
}
TOOLS["pip3"] = TOOLS["pip"]
TOOLS["apt"] = TOOLS["apt-get"]
