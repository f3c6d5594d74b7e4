"""Run the demo: prepare the model, start the stack, play the chat twice, compare, show and write the results."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from openai import OpenAIError

from workers.demo import chart, machine, report
from workers.demo.conversation import document
from workers.demo.play import CONVERSATION_HEADER, Turn, play
from workers.demo.screen import Screen
from workers.stack import Stack, StackOptions
from workers.supervision import StackError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

ANSWER_TOKENS: Final = 64
"""At most, per turn: enough to see that the texts are the same, and soon over."""

FREE_CONTEXT_TOKENS: Final = 256
"""What the questions and the chat template take, besides the document and the answers."""

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
                prefill={"prefix_caching": args.prefill_cache == "on"},
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
    with screen, Stack(options, screen.progress) as stack:
        screen.say(
            f"  prefill worker on core {_cores(stack, 'prefill')}, decode worker on core {_cores(stack, 'decode')},"
            f" Envoy on {stack.base_url}"
        )
        pasted = document(args.document_tokens, lambda text: len(_tokens(stack, text)))
        _check_context(stack, pasted, args)
        rows, read_tokens = _play_both(stack, args, pasted, screen)
        verdict = report.judge(rows)
        screen.__exit__(None, None, None)
        _show(screen, rows, verdict, read_tokens=read_tokens, prefill_cache=args.prefill_cache == "on")
        _write(args, rows, verdict, about, options, read_tokens, screen)
        if args.keep:
            _wait_for_interrupt(stack, options, screen)
    return verdict.exit_code


def _play_both(stack: Stack, args: argparse.Namespace, pasted: str, screen: Screen) -> tuple[list[report.TurnRow], int]:
    """Play with reuse off, then on. Returns the rows and how many tokens P says it read from elsewhere meanwhile."""
    screen.say(f"Playing {args.turns} turns about a document, streamed, temperature 0, reuse off:")
    stack.restart_extproc({"KVLOOP_REUSE": "false"})
    off = _play_one(stack, args, pasted, "off", screen)
    screen.say("The same chat with reuse on:")
    stack.restart_extproc()
    before = _tokens_read(stack)
    on = _play_one(stack, args, pasted, "on", screen)
    return report.rows(off, on), _tokens_read(stack) - before


def _play_one(stack: Stack, args: argparse.Namespace, pasted: str, label: str, screen: Screen) -> list[Turn]:
    played: list[Turn] = []
    turns = play(
        stack.base_url,
        stack.options.served_model_name,
        pasted,
        turns=args.turns,
        name=f"demo-{label}-{time.time_ns():x}",
        max_tokens=ANSWER_TOKENS,
    )
    for number in range(1, args.turns + 1):
        screen.waiting(f"reuse {label}, turn {number} of {args.turns}")
        played.append(next(turns))
        screen.played(label, number, played[-1])
        stack.check()
    return played


def _tokens_read(stack: Stack) -> int:
    """Return the prefill worker's own count of prompt tokens that it got from its connector instead of computing."""
    return int(stack.metrics("prefill").get("vllm:external_prefix_cache_hits_total", 0))


def _tokens(stack: Stack, text: str) -> list[int]:
    body = {"model": stack.options.served_model_name, "prompt": text, "add_special_tokens": False}
    answer = stack.request("POST", stack.url("prefill"), "/tokenize", body=body)
    if answer.status != http.client.OK:
        raise StackError(f"The prefill worker could not tokenise the document: {answer.text[:300]}")
    tokens: list[int] = json.loads(answer.text)["tokens"]
    return tokens


def _check_context(stack: Stack, pasted: str, args: argparse.Namespace) -> None:
    models = stack.request("GET", stack.url("prefill"), "/v1/models")
    limit = json.loads(models.text)["data"][0]["max_model_len"]
    needed = len(_tokens(stack, pasted)) + args.turns * ANSWER_TOKENS + FREE_CONTEXT_TOKENS
    if needed > limit:
        raise StackError(
            f"the chat needs about {needed:,} tokens of context, the model has {limit:,}."
            " What to do: give a smaller --document-tokens or fewer --turns."
        )


def _show(
    screen: Screen, rows: list[report.TurnRow], verdict: report.Verdict, *, read_tokens: int, prefill_cache: bool
) -> None:
    screen.say()
    screen.table(rows)
    screen.say("\nReceipts (response header x-kvloop-receipt):")
    screen.receipts(rows)
    screen.say("\nQuestions, and the answers given with reuse on:")
    screen.answers(rows)
    screen.say(f"\n{WARM_EXPLANATION if prefill_cache else COLD_EXPLANATION}")
    screen.say(f"By the prefill worker's own counter it read {read_tokens:,} tokens back from the decode worker.")
    changes = [row.largest_logprob_change for row in rows if row.largest_logprob_change is not None]
    if changes:
        screen.say(f"Largest change of a chosen token's log-probability between the runs: {max(changes):.4f}.")
    screen.say()
    screen.verdict(verdict)


def _write(
    args: argparse.Namespace,
    rows: list[report.TurnRow],
    verdict: report.Verdict,
    about: dict[str, Any],
    options: StackOptions,
    read_tokens: int,
    screen: Screen,
) -> None:
    if args.json:
        run_facts = {
            "model": options.served_model_name,
            "prefill_cache": args.prefill_cache,
            "return": args.return_mode,
            "document_tokens": args.document_tokens,
            "answer_tokens": ANSWER_TOKENS,
            "tokens_read_by_prefill_worker": read_tokens,
        }
        args.json.write_text(json.dumps(report.as_json(rows, verdict, about, run_facts), indent=1) + "\n")
        screen.say(f"Numbers: {args.json}")
    cache = "with" if args.prefill_cache == "on" else "without"
    chart.draw(
        rows,
        title="Time to first token of a growing chat, prefill and decode on separate vLLM workers",
        footnote=f"{options.served_model_name}, P {cache} prefix caching, streamed through Envoy, temperature 0,"
        f" texts {'equal' if verdict.texts_equal else 'not all equal'}.\n{machine.summary(about)}.",
        path=args.chart,
    )
    screen.say(f"Chart: {args.chart}")


def _wait_for_interrupt(stack: Stack, options: StackOptions, screen: Screen) -> None:
    body = json.dumps(
        {
            "model": options.served_model_name,
            "messages": [{"role": "user", "content": "Say something about lighthouses."}],
            "max_tokens": 40,
            "stream": True,
        }
    )
    screen.say(
        "\nEverything keeps running. Try, in another terminal (repeat it with the answer and a next question appended):\n"
        f"\n  curl -isN {stack.base_url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -H '{CONVERSATION_HEADER}: mine' -d '{body}'\n"
        f"\nLogs, Envoy's access log and configuration: {options.run_directory}\nCtrl-C stops it."
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
    screen.say(f"Preparing {directory.name} (once, about 20 s) in {directory}")
    script = "import sys; from workers.models import prepare_smollm2; prepare_smollm2(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(directory)], check=False)  # noqa: S603 - our own code
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
