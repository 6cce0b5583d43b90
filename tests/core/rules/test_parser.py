"""The format of a list: what becomes a rule, from which line, and what is wrong with a list that is refused."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoamp.core import CastPolicy, CastRule, ModulePrecision, ModuleRule, RuleSource
from autoamp.errors import ListFileError
from tests.core.rules._shared import POLICY_KEYS, check_refused, list_sets, load, policies, write


def test_a_file_becomes_rules_with_their_lines(place: Path) -> None:
    text = """
extends = []
# "gelu" is only mentioned here
fp16 = ["einsum",  # "relu"
        'linear', "mypkg.ops.fused"]
"fp32" = [
    # "linear" no
    "softmax",

    \"\"\"mypkg.losses.focal_loss\"\"\", ]
promote = ["cat"]
none = ["gelu"]
[banned]
binary_cross_entropy = "use binary_cross_entropy_with_logits"
"mypkg.bad" = "no"
[modules]
"encoder.layers.0.*" = "fp32"
'torchvision.ops.FrozenBatchNorm2d' = "none"
"""
    path = write(place / "mine.toml", text)
    table = load(path)
    got = {rule.target: (rule.policy.name, rule.origin.line) for rule in table.rules}
    assert got == {
        "einsum": ("FP16", 5),
        "linear": ("FP16", 6),
        "softmax": ("FP32", 9),
        "cat": ("PROMOTE", 12),
        "gelu": ("NONE", 13),
        "binary_cross_entropy": ("BANNED", 15),
        "mypkg.ops.fused": ("FP16", 6),
        "mypkg.losses.focal_loss": ("FP32", 11),
        "mypkg.bad": ("BANNED", 16),
    }
    assert [rule.bare for rule in table.rules] == [True] * 6 + [False] * 3
    assert {rule.remedy for rule in table.rules} == {"", "use binary_cross_entropy_with_logits", "no"}
    origin = table.rules[0].origin
    assert (str(origin), origin.shipped) == (f"{path}:5", False)
    assert table.modules == (
        ModuleRule("encoder.layers.0.*", ModulePrecision.FP32, RuleSource(str(path), 18, False)),
        ModuleRule("torchvision.ops.FrozenBatchNorm2d", ModulePrecision.NONE, RuleSource(str(path), 19, False)),
    )
    assert table.sources == (str(path),)


def test_half_is_another_word_for_fp16(place: Path) -> None:
    text = """
extends = []
fp16 = ["einsum"]
half = ["linear",
        "relu"]  # why
[modules]
"mypkg.A" = "half"
"mypkg.B" = "fp16"
"""
    table = load(write(place / "mine.toml", text))
    assert [(rule.target, rule.policy, rule.origin.line, rule.reason) for rule in table.rules] == [
        ("einsum", CastPolicy.FP16, 4, ""),
        ("linear", CastPolicy.FP16, 5, ""),
        ("relu", CastPolicy.FP16, 6, "why"),
    ]
    assert [rule.precision for rule in table.modules] == [ModulePrecision.FP16] * 2
    with pytest.raises(ListFileError, match=r"'linear' is under fp16 .* and again under fp16"):
        load({"extends": [], "fp16": ["linear"], "half": ["linear"]})


def test_the_comment_beside_an_entry_is_its_reason(place: Path) -> None:
    text = 'fp32 = [\n  "softmax",  # sums exponentials\n  "exp",\n]\n[modules]\n"head.*" = "fp32"  # overflows\n'
    table = load(str(write(place / "reasons.toml", "extends = []\n" + text)))
    assert [(rule.target, rule.reason) for rule in table.rules] == [("softmax", "sums exponentials"), ("exp", "")]
    assert [(rule.pattern, rule.reason) for rule in table.modules] == [("head.*", "overflows")]
    # A mapping has no lines.
    assert [rule.reason for rule in load({"extends": [], "fp32": ["softmax"]}).rules] == [""]


def test_a_none_table_gives_each_name_its_reason(place: Path) -> None:
    text = 'extends = []\n[none]\n"moves elements" = ["cat",\n"stack"]\nrandom = ["dropout", "mypkg.ops.noise"]'
    table = load(write(place / "mine.toml", text))
    assert [(rule.target, rule.policy, rule.reason, rule.origin.line) for rule in table.rules] == [
        ("cat", CastPolicy.NONE, "moves elements", 4),
        ("stack", CastPolicy.NONE, "moves elements", 5),
        ("dropout", CastPolicy.NONE, "random", 6),
        ("mypkg.ops.noise", CastPolicy.NONE, "random", 6),
    ]


def test_a_rule_may_be_limited_to_versions(place: Path) -> None:
    text = 'extends = []\nfp32 = ["polar", "exp"]\n[versions]\npolar = ">=2.14"'
    table = load(write(place / "mine.toml", text))
    assert {rule.target: (rule.versions, rule.origin.line) for rule in table.rules} == {
        "polar": (">=2.14", 3),
        "exp": ("", 3),
    }


def test_a_rule_may_be_limited_to_devices(place: Path) -> None:
    write(place / "below.toml", 'extends = []\nfp32 = ["exp", "log"]')
    text = 'extends = "./below.toml"\nnone = ["exp", "log"]\n[devices]\nexp = "cpu"\nlog = "cuda, xpu"'
    above = str(write(place / "above.toml", text))
    assert policies(load(above, device_type="cpu")) == {"exp": "none", "log": "fp32"}
    assert policies(load(above, device_type="xpu")) == {"exp": "fp32", "log": "none"}
    assert {rule.target: rule.devices for rule in load(above).rules} == {"exp": ("cpu",), "log": ("cuda", "xpu")}


def test_lines_of_inline_and_dotted_tables(place: Path) -> None:
    text = 'extends = []\nbanned.relu = "r"\nmodules = { "a.b" = "fp32", c = "fp16" }\nnone = []'
    table = load(write(place / "mine.toml", text))
    assert [(rule.target, rule.origin.line) for rule in table.rules] == [("relu", 3)]
    assert [(rule.pattern, rule.origin.line) for rule in table.modules] == [("a.b", 4), ("c", 4)]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(place: Path) -> None:
    path = place / "mine.toml"
    path.write_bytes(b'\xef\xbb\xbfschema = 1\r\nextends = []\r\nfp32 = [\r\n"softmax",\r\n]\r\n')
    assert load(path).rules == (CastRule("softmax", CastPolicy.FP32, RuleSource(str(path), 4, False)),)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('fp23 = ["softmax"]', 2, ["unknown key 'fp23'", "'fp32'", "'modules'"]),
        ("lists = []", 2, ["unknown key 'lists'"]),
        ("[bannd]\nx = 'y'", 2, ["unknown key 'bannd'", "did you mean 'banned'"]),
        ('fp32 = ["softmax"]\nfp16 = [\n"linear",\n"softmax"]', 2, ["'softmax'", "fp16", "fp32", ":2)", ":5)"]),
        ('fp32 = ["softmax"]\n[banned]\nsoftmax = "no"', 4, ["'softmax'", "fp32", "banned", ":2)", ":4)"]),
        ('fp32 = ["softmax",\n"softmax"]', 3, ["'softmax'", ":2)", ":3)"]),
        ('fp32 = "softmax"', 2, ["fp32 must be an array of strings", "'softmax'", "(str)"]),
        ("none = [\n1]", 2, ["none must be an array of strings", "1 (int)"]),
        ("fp32 = [['softmax']]", 2, ["['softmax'] (list)"]),
        ("extends = 1.5", 2, ["extends must be a string or an array of strings", "1.5 (float)"]),
        ("extends = [true]", 2, ["True (bool)"]),
        ("banned = ['x']", 2, ["banned must be a table", "(list)"]),
        ("[banned]\n\nx = 3", 4, ["banned 'x' must be a string", "3 (int)"]),
        ("[banned]\nmypkg.f = 'no'", 3, ["banned 'mypkg'", "quotes", "(dict)"]),
        ("[modules]\n'a' = 'fp8'", 3, ["'a'", "'fp8'", "Choose 'fp16', 'fp32', 'none'"]),
        ("[modules]\n'' = 'fp32'", 3, ["''", "not a path or class"]),
        ("[modules]\n'a b' = 'fp32'", 3, ["'a b'", "not a path or class"]),
        ("[modules]\n' a' = 'fp32'", 3, ["' a'", "not a path or class"]),
        ("fp32 = ['soft max']", 2, ["'soft max'", "not an op name"]),
        ("fp32 = ['softmax', '']", 2, ["'' under fp32"]),
        ("fp32 = [\n'torch..softmax']", 3, ["'torch..softmax'"]),
        ("[banned]\n'a.1b' = 'no'", 3, ["'a.1b' under banned"]),
        ("extends = 'defalt'", 2, ["'defalt' is unknown", "did you mean 'default'"]),
        ("extends = [\n'default',\n'./gone.toml']", 4, ["gone.toml", "cannot be read"]),
        ("fp32 = [\n'softmax'\n'gelu'\n]", 4, ["not valid TOML"]),
        ("fp32 = [", 2, ["not valid TOML"]),
        ("fp32 = []\nfp32 = []", 3, ["not valid TOML"]),
        ("fp32 = " + "[" * 5000, None, ["not valid TOML"]),
        ("[none]\nmoves = 'cat'", 3, ["none 'moves' must be an array of names, with the reason as its key; got 'cat'"]),
        ("[none]\nmoves = [1]", 3, ["none moves must be an array of strings; got 1"]),
        ("fp32 = ['cat']\n[none]\nmoves = ['cat']", 4, ["'cat' is under fp32", "and again under none"]),
        ("fp32 = ['exp']\n[versions]\nexpp = '>=2.1'", 4, ["'expp' under versions has no rule", "did you mean 'exp'"]),
        ("fp32 = ['exp']\n[versions]\nexp = '2.1'", 4, ["'exp' under versions has '2.1'; write '>=2.13'"]),
        ("fp32 = ['exp']\n[versions]\nexp = 2", 4, ["versions 'exp' must be a string"]),
        ("fp32 = ['exp']\n[devices]\nexpp = 'cpu'", 4, ["'expp' under devices has no rule", "did you mean 'exp'"]),
        ("fp32 = ['exp']\n[devices]\nexp = 'cdua'", 4, ["'exp' under devices has 'cdua'; write one of 'cpu', 'cuda',"]),
        ("fp32 = ['exp']\n[devices]\nexp = 'cuda:0'", 4, ["'exp' under devices has 'cuda:0'"]),
        ("fp32 = ['exp']\n[devices]\nexp = ['cpu']", 4, ["devices 'exp' must be a string"]),
    ],
)  # fmt: skip
def test_a_wrong_file_says_what_is_wrong_and_where(place: Path, text: str, line: int | None, words: list[str]) -> None:
    path = write(place / "mine.toml", text)
    check_refused(path, path, line, words)


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"fp32 = []", None, ["the key 'schema' is missing", "'schema = 1'"]),
        (b"\nschema = 2", 2, ["schema=2", "'schema = 1'"]),
        (b"schema = true", 1, ["schema=True (bool)"]),
        (b"schema = '1'", 1, ["schema='1' (str)"]),
        (b"schema = 1.0", 1, ["schema=1.0 (float)"]),
        (b"schema = 1\n# \xff\n", 2, ["not UTF-8"]),
        (b"\n\xff", 2, ["not UTF-8"]),
    ],
)
def test_a_wrong_schema_or_encoding(place: Path, content: bytes, line: int | None, words: list[str]) -> None:
    path = place / "mine.toml"
    path.write_bytes(content)
    check_refused(path, path, line, words)


# -- random lists --


@st.composite
def toml_texts(draw: st.DrawFn) -> tuple[dict[str, Any], str, dict[str, int]]:
    """A valid list set, its text in a random layout, and the line of each target and pattern."""
    data = draw(list_sets())
    noise = st.lists(st.sampled_from(["", "  # fp32 = ['linear']", "\t", '# "softmax"]']), max_size=2)
    lines: list[str] = []
    places: dict[str, int] = {}

    def quoted(text: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_.*]+", text) and draw(st.booleans()):
            return f"'{text}'"
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

    for key in draw(st.permutations(["schema", "extends", *POLICY_KEYS])):
        lines += [*draw(noise), "schema = 1" if key == "schema" else f"{key} = ["]
        for entry in [] if key == "schema" else data[key]:
            if draw(st.booleans()):
                lines += [*draw(noise), ""]
            lines[-1] += f"{quoted(entry)} ,"
            places[entry] = len(lines)
        lines[-1] += "]" if key != "schema" else ""
    for key in draw(st.permutations(["banned", "modules"])):
        lines += [*draw(noise), draw(st.sampled_from([f"[{key}]", f'[ "{key}" ] # x = "y"']))]
        for name, value in data[key].items():
            lines += [*draw(noise), f"{quoted(name)} = {quoted(value)}"]
            places[f"{key}:{name}"] = len(lines)
    return data, "\n".join(lines), places


@given(toml_texts())
def test_what_is_written_is_read_back_with_its_lines(
    tmp_path_factory: pytest.TempPathFactory, written: tuple[dict[str, Any], str, dict[str, int]]
) -> None:
    data, text, places = written
    path = tmp_path_factory.mktemp("lists") / "mine.toml"
    path.write_text(text, encoding="utf-8", newline="\n")
    table = load(path)
    expected = {name: key for key in POLICY_KEYS for name in data[key]}
    expected |= dict.fromkeys(data["banned"], "banned")
    assert policies(table) == expected
    assert {rule.target: rule.remedy for rule in table.rules if rule.policy is CastPolicy.BANNED} == data["banned"]
    assert {rule.pattern: rule.precision.value for rule in table.modules} == data["modules"]
    for rule in table.rules:
        banned = "banned:" * (rule.policy is CastPolicy.BANNED)
        assert rule.origin.line == places[banned + rule.target]
    for module in table.modules:
        assert module.origin.line == places[f"modules:{module.pattern}"]
    same = load(data)
    assert [(rule.target, rule.policy) for rule in same.rules] == [(rule.target, rule.policy) for rule in table.rules]


garbage = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(
        st.sampled_from(
            [*"[]{}=,.\n\"'#\\ ", '"""', "'''", "schema = 1\n", "fp32", "banned", "[modules]\n", "'a'", "1", "extends",
             "1979-05-27", "inf", "'default'", "true", "x = 'y'"]
        ),
        max_size=25,
    ).map(lambda parts: ("schema = 1\n" + "".join(parts)).encode()),
)  # fmt: skip


@given(garbage)
def test_garbage_raises_nothing_but_a_list_file_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("lists") / "mine.toml"
    path.write_bytes(content)
    with contextlib.suppress(ListFileError):
        assert load(path).sources[-1] == str(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*POLICY_KEYS, "schema", "extends", "banned", "modules", "x"]), values))
def test_a_mapping_of_garbage_raises_nothing_but_a_list_file_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(ListFileError):
        assert load(data).sources[-1] == "lists="
