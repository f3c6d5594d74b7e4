"""What reads bytes from outside, under a coverage-guided fuzzer for a quarter of a minute, and on its seed corpus."""

from __future__ import annotations

from pathlib import Path

import fuzz
import fuzz_targets
import pytest
import seed_corpus
from hypothesis import given
from hypothesis import strategies as st

from extproc import splice

CORPUS = sorted((Path(fuzz.__file__).parent / "corpus").glob("*/*"))
SECONDS = 15


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus_is_handled(path: Path) -> None:
    fuzz_targets.run(path.parent.name, path.read_bytes())


def test_every_target_has_a_corpus_and_every_seed_is_made_from_the_recordings() -> None:
    made = dict(seed_corpus.seeds())
    assert {name.partition("/")[0] for name in made} == set(fuzz.TARGETS) == set(fuzz_targets.TARGETS)
    present = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in CORPUS}
    assert {name: present.get(name) for name in made} == made, "run python tests/fuzz/seed_corpus.py"


@given(st.binary(max_size=80))
def test_bytes_always_spell_a_json_object(data: bytes) -> None:
    """Else the fuzzers of requests and handles would test the JSON parser only."""
    text = fuzz_targets.spelled(data, fuzz_targets.HANDLE)
    assert splice.object_start(text) == 0
    assert isinstance(fuzz_targets._parsed(text), dict)


def test_nothing_breaks_while_coverage_leads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        results = fuzz.fuzz(fuzz.TARGETS, SECONDS, 1, tmp_path, lambda text: print(text, flush=True))
    assert [found for found in results if not found.is_good] == []
    assert all(found.features > 20 for found in results), "no coverage leads it"


@pytest.mark.parametrize(
    ("target", "module", "name", "broken"),
    [
        ("answer", "extproc.turn", "_hidden", lambda *_, **__: ({}, set())),
        ("request", "extproc.request", "_cleared", lambda text, _: (text, 0)),
        ("handle", "extproc.handle", "release_params", lambda handle: handle.raw),
    ],
)
def test_a_fault_in_what_is_fuzzed_is_found(monkeypatch: pytest.MonkeyPatch, target, module, name, broken) -> None:
    monkeypatch.setattr(f"{module}.{name}", broken)
    found = 0
    for path in CORPUS:
        if path.parent.name == target:
            try:
                fuzz_targets.run(target, path.read_bytes())
            except AssertionError:
                found += 1
    assert found
