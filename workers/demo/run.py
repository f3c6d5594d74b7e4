"""Run the demo: prepare the model, start the stack, play the chat twice, compare, show and write the results."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openai import OpenAIError

from workers.demo import chart, machine, report
from workers.demo.conversation import document
from workers.demo.play import CONVERSATION_FIELD, Turn, play
from workers.demo.screen import Screen
from workers.intercepted import ORCHESTRATORS, Intercepted
from workers.stack import KV_CACHE_USAGE, Stack, StackOptions
from workers.supervision import StackError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

ANSWER_TOKENS: Final = 64
"""At most, per turn: enough to see that the texts are the same, and soon over."""

EXACT: Final = ("--dtype", "float32", "--block-size", "128")
"""Long blocks make few and large reads, which NIXL likes; nothing is cut in this chat, so their length costs nothing but after
an early return: P's own cache holds whole blocks only, and what it finds there lacks up to a block's tokens.

In bfloat16 rounding alone moves log-probabilities by several hundredths, enough to turn a near tie, and then a
difference would prove nothing. In float32 equal texts mean equal KV."""

RETURN_PATIENCE_SECONDS: Final = 10.0

QUESTION_TOKENS: Final = 64
"""Generously, what a question and the chat template around it take."""

COLD_EXPLANATION: Final = (
    "The prefill worker runs without prefix caching: it stands for a worker whose cache has evicted this conversation,"
    "\nor for another worker of the pool. `--prefill-cache on` shows the other case."
)
WARM_EXPLANATION: Final = (
    "The prefill worker runs with prefix caching, so it still has the prompts of its own earlier turns in both runs;"
    "\nonly the answers, which the decode worker computed, are left to read back. Without `--prefill-cache on` it stands"
    "\nfor a worker that has evicted the conversation."
)


def run(args: argparse.Namespace, model_directory: Path) -> int:
    """Run the whole demo; returns the exit status (see ``workers.demo.main``)."""
    screen = Screen()
    logs = Path(tempfile.mkdtemp(prefix="kvloop-demo-"))
    keep_logs = True
    try:
        with _terminations_as_interrupts():
            model = args.model.resolve() if args.model else _prepare_model(model_directory, screen)
            options = StackOptions(
                model=model,
                run_directory=logs,
                served_model_name=model.name,
                prefill={"prefix_caching": _caches(args), "extra": EXACT},
                decode={"extra": EXACT},
            )
            code = _run_stack(args, options, screen)
            keep_logs = code != 0
            return code
    except (StackError, OpenAIError, OSError) as error:
        screen.say(f"kvloop demo failed: {error}", style="bold red")
        return 1
    except KeyboardInterrupt:
        screen.say("Interrupted; everything was stopped.")
        return 130
    finally:
        if keep_logs:
            screen.say(f"Logs: {logs}")
        else:
            shutil.rmtree(logs, ignore_errors=True)


def _run_stack(args: argparse.Namespace, options: StackOptions, screen: Screen) -> int:
    about = machine.describe()
    screen.say(f"kvloop demo on {machine.summary(about)}")
    with screen, Stack(options, screen.progress) as stack, _front(stack, args, screen) as front:
        screen.say(
            f"  prefill worker on core {_cores(stack, 'prefill')}, decode worker on core {_cores(stack, 'decode')},"
            f" {'Envoy' if front is stack else args.orchestrator} on {front.base_url}"
        )
        result = _play_both(stack, front, args, about, screen)
        screen.quieten()
        _show(result, screen)
        _write(args, result, screen)
        if args.keep:
            _wait_for_interrupt(stack, front, screen)
    return result.verdict.exit_code


def _front(stack: Stack, args: argparse.Namespace, screen: Screen) -> AbstractContextManager[Stack | Intercepted]:
    """Return what clients talk to: kvloop's own gateway, or an orchestrator over the same workers."""
    if args.topology == "gateway":
        return contextlib.nullcontext(stack)
    return Intercepted(stack, ORCHESTRATORS[args.orchestrator], stack.options.run_directory, screen.progress)


def _play_both(
    stack: Stack, front: Stack | Intercepted, args: argparse.Namespace, about: dict[str, Any], screen: Screen
) -> report.Result:
    """Play the chat with reuse off, then on."""
    pasted = document(args.document_tokens, lambda text: _count_tokens(stack, text))
    document_tokens = _count_tokens(stack, pasted)
    _check_context(stack, document_tokens, args.turns)
    screen.say(f"{args.turns} turns about a document of {document_tokens:,} tokens, temperature 0, reuse off:")
    front.restart_extproc({"KVLOOP_REUSE": "false"})
    off = _play_one(stack, front, screen, "off", turns=args.turns, pasted=pasted)
    screen.say(f"The same chat with reuse on, {args.return_mode}:")
    front.restart_extproc({"KVLOOP_RETURN_MODE": args.return_mode})
    before = _tokens_read(stack)
    on = _play_one(stack, front, screen, "on", turns=args.turns, pasted=pasted, waits=args.return_mode == "eager")
    rows = report.rows(off, on)
    run_facts = {
        "model": stack.options.served_model_name,
        "prefill_cache": "on" if _caches(args) else "off",
        "through": "Envoy" if front is stack else args.orchestrator,
        "return": args.return_mode,
        "document_tokens": document_tokens,
        "answer_tokens_limit": ANSWER_TOKENS,
        "tokens_read_by_prefill_worker": _tokens_read(stack) - before,
    }
    if args.return_mode == "eager":
        screen.say("And once more, lazy:")
        front.restart_extproc()
        lazy = _play_one(stack, front, screen, "lazy", turns=args.turns, pasted=pasted)
        run_facts["ttft_later_turns_ms"] = {"eager": _later_ttft_ms(on), "lazy": _later_ttft_ms(lazy)}
    return report.Result(rows, report.judge(rows), run_facts, about)


def _caches(args: argparse.Namespace) -> bool:
    """Whether P caches prefixes. What is read back early is looked for there."""
    return bool(args.prefill_cache == "on" or args.return_mode == "eager")


def _later_ttft_ms(turns: list[Turn]) -> float | None:
    later = [turn.ttft_seconds for turn in turns[1:]]
    return round(1000 * statistics.fmean(later), 1) if later else None


def _let_return(stack: Stack) -> None:
    """Wait, as a reader would, until D has nothing left to keep."""
    deadline = time.monotonic() + RETURN_PATIENCE_SECONDS
    while stack.metrics("decode").get(KV_CACHE_USAGE, 0) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)


def _play_one(
    stack: Stack,
    front: Stack | Intercepted,
    screen: Screen,
    label: str,
    *,
    turns: int,
    pasted: str,
    waits: bool = False,
) -> list[Turn]:
    conversation = play(
        front.base_url,
        stack.options.served_model_name,
        pasted,
        turns=turns,
        name=f"demo-{label}-{time.time_ns():x}",
        max_tokens=ANSWER_TOKENS,
    )
    played: list[Turn] = []
    for number in range(1, turns + 1):
        screen.waiting(f"reuse {label}, turn {number} of {turns}")
        played.append(next(conversation))
        screen.played(label, number, played[-1])
        if waits:
            _let_return(stack)
        stack.check()
        front.check()
    return played


def _tokens_read(stack: Stack) -> int:
    """Return the prefill worker's own count of prompt tokens that it got from its connector instead of computing."""
    return int(stack.metrics("prefill").get("vllm:external_prefix_cache_hits_total", 0))


def _count_tokens(stack: Stack, text: str) -> int:
    body = {"model": stack.options.served_model_name, "prompt": text, "add_special_tokens": False}
    answer = stack.request("POST", stack.url("prefill"), "/tokenize", body=body)
    if answer.status != http.client.OK:
        raise StackError(f"the prefill worker could not tokenise the document: {answer.text[:300]}")
    return int(json.loads(answer.text)["count"])


def _check_context(stack: Stack, document_tokens: int, turns: int) -> None:
    models = stack.request("GET", stack.url("prefill"), "/v1/models")
    limit = json.loads(models.text)["data"][0]["max_model_len"]
    needed = document_tokens + turns * (ANSWER_TOKENS + QUESTION_TOKENS)
    if needed > limit:
        raise StackError(
            f"the chat needs about {needed:,} tokens of context, the model has {limit:,}."
            " What to do: give a smaller --document-tokens or fewer --turns."
        )


def _show(result: report.Result, screen: Screen) -> None:
    screen.say()
    screen.table(result.rows)
    screen.say("\nReceipts (response header x-kvloop-receipt):")
    screen.receipts(result.rows)
    screen.say("\nQuestions, and the answers given with reuse on:")
    screen.answers(result.rows)
    screen.say(f"\n{WARM_EXPLANATION if result.run['prefill_cache'] == 'on' else COLD_EXPLANATION}")
    read = result.run["tokens_read_by_prefill_worker"]
    screen.say(f"By the prefill worker's own counter it read {read:,} tokens back from the decode worker.")
    times = result.run.get("ttft_later_turns_ms")
    if times and None not in times.values():
        saved = 1 - times["eager"] / times["lazy"]
        screen.say(
            f"From the second turn on, to the first token: eager {times['eager']:,.0f} ms, lazy {times['lazy']:,.0f} ms:"
            f" eager is {abs(saved):.0%} {'faster' if saved > 0 else 'SLOWER'}."
        )
    changes = [row.largest_logprob_change for row in result.rows if row.largest_logprob_change is not None]
    if changes:
        screen.say(f"Largest change of a chosen token's log-probability between the runs: {max(changes):.1e}.")
    screen.say()
    # With its own prompts still cached, P has little left to compute either way.
    screen.verdict(result.verdict, 0.0 if result.run["prefill_cache"] == "on" else report.TTFT_RATIO_GOAL)


def _write(args: argparse.Namespace, result: report.Result, screen: Screen) -> None:
    if args.json:
        args.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        screen.say(f"Numbers: {args.json}")
    cache = "with" if result.run["prefill_cache"] == "on" else "without"
    chart.draw(
        result.rows,
        title="Time to first token in a growing chat",
        footnote=f"{result.run['model']}, P {cache} prefix caching, streamed through {result.run['through']}, temperature 0,"
        f" texts {'equal' if result.verdict.texts_equal else 'not all equal'}.\n{machine.summary(result.machine)}.",
        path=args.chart,
    )
    screen.say(f"Chart: {args.chart}")


def _wait_for_interrupt(stack: Stack, front: Stack | Intercepted, screen: Screen) -> None:
    body = json.dumps(
        {
            "model": stack.options.served_model_name,
            "messages": [{"role": "user", "content": "Say something about lighthouses."}],
            "max_tokens": 40,
            "stream": True,
            CONVERSATION_FIELD: "mine",
        }
    )
    screen.say(
        "\nEverything keeps running. Try, in another terminal (repeat it with the answer and a next question appended):\n"
        f"\n  curl -isN {front.base_url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{body}'\n"
        f"\nLogs, Envoy's access log and configuration: {stack.options.run_directory}\nCtrl-C stops it."
    )
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            stack.check()
            time.sleep(1)
    screen.say("Stopping.")


def _prepare_model(directory: Path, screen: Screen) -> Path:
    """Prepare the model in a process of its own: what torch takes to do it is given back before the workers start."""
    if (directory / "config.json").is_file():
        return directory
    screen.say(f"The model goes to {directory}.")
    script = "import sys; from workers.models import prepare_smollm2; prepare_smollm2(sys.argv[1])"
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", script, str(directory)], check=False, env={**os.environ, "TQDM_DISABLE": "1"}
    )
    if done.returncode != 0:
        raise StackError(f"{directory.name} could not be prepared, see above. What to do: run `make setup` again.")
    return directory


def _cores(stack: Stack, role: Any) -> str:
    return ", ".join(str(core) for core in sorted(stack.cores(role)))


@contextlib.contextmanager
def _terminations_as_interrupts() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind like Ctrl-C, so that they stop the stack, too."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous: list[Callable[..., Any] | int | None] = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
