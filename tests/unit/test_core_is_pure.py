"""The core takes bytes and times as arguments and returns decisions: it can reach no network, clock or environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import extproc

PACKAGE = Path(extproc.__file__).parent
CORE = (
    "admission",
    "attaching",
    "budget",
    "capturing",
    "debug_state",
    "doctor_findings",
    "endpoints",
    "errors",
    "events",
    "exchange",
    "gaps",
    "handle",
    "handle_hosts",
    "headers",
    "http2",
    "http_exchange",
    "identity",
    "intercept_decode",
    "intercept_prefill",
    "legs",
    "policy",
    "pool",
    "prompt_mark",
    "proof",
    "receipt",
    "request",
    "returning",
    "reuse",
    "server_clock",
    "splice",
    "sse",
    "store",
    "store_format",
    "top_picture",
    "turn",
    "worker_metrics",
)
START = ("__init__", "settings")
"""Read before anything runs. ``settings`` looks at the environment, so the core may know its type only."""

ALLOWED_OUTSIDE = {
    "__future__",
    "abc",
    "array",
    "base64",
    "binascii",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "hpack",
    "ipaddress",
    "itertools",
    "re",
    "struct",
    "typing",
    "orjson",
}
"""Everything else (grpc, asyncio, aiohttp, time, os, random, logging, socket, ...) does something to the world."""


def imports(source: str, *, for_types: bool) -> set[str]:
    """Full names of the imported modules: those only for type checkers, or all others, wherever they stand."""
    tree = ast.parse(source)
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if (id(node) in guarded) != for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            # ``from extproc import splice`` names a module, ``from extproc.splice import edit`` does not.
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "extproc" else set()
            names |= {node.module} if node.module and node.module != "extproc" else set()
    return names


def impure(names: set[str]) -> set[str]:
    core = {f"extproc.{module}" for module in CORE}
    return {name for name in names if name not in core and name.partition(".")[0] not in ALLOWED_OUTSIDE}


def test_every_module_is_core_or_shell() -> None:
    """A new core module belongs in the list above; a shell is whatever imports something that acts."""
    shells = {
        path.stem
        for path in PACKAGE.glob("*.py")
        if path.stem not in (*CORE, *START) and impure(imports(path.read_text(), for_types=False))
    }
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*CORE, *START, *shells}


@pytest.mark.parametrize("module", CORE)
def test_hazard_45_the_core_imports_nothing_that_acts_not_even_a_clock(module: str) -> None:
    assert impure(imports((PACKAGE / f"{module}.py").read_text(), for_types=False)) == set()


@pytest.mark.parametrize("module", CORE)
def test_for_types_the_core_may_know_the_settings_too(module: str) -> None:
    names = imports((PACKAGE / f"{module}.py").read_text(), for_types=True)
    assert impure(names) <= {"extproc.settings"}


@pytest.mark.parametrize("module", CORE)
def test_the_core_opens_and_evaluates_nothing(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called.isdisjoint({"open", "print", "input", "eval", "exec", "__import__", "breakpoint"})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", {"time"}),
        ("import os.path as p", {"os.path"}),
        ("from asyncio import sleep", {"asyncio"}),
        ("def f():\n    import socket", {"socket"}),
        ("from extproc import wire", {"extproc.wire"}),
        ("from extproc.gateway import Gateway", {"extproc.gateway"}),
        ("from extproc import splice, proof\nimport orjson\nfrom collections.abc import Mapping", set()),
        ("if TYPE_CHECKING:\n    import grpc", set()),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import grpc", {"grpc"}),
    ],
)
def test_the_check_sees_every_kind_of_import(source: str, expected: set[str]) -> None:
    assert impure(imports(source, for_types=False)) == expected
