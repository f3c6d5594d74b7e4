"""Folding responses, on what real workers sent: however a stream is cut, same outcome, same client bytes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import handle_params, sse

from extproc.handle import read_publication
from extproc.proof import fingerprint
from extproc.turn import Learned, ResponseTooLarge, StreamedTurn, TurnFold, Watch, WholeTurn

RECORDINGS = Path(__file__).parent.parent / "recordings"
LARGE = 10**9
ASKS = Watch(learn_token_ids=True, hide_token_ids=True, event_max_bytes=LARGE, response_max_bytes=LARGE)
ASKS_NOTHING = Watch(learn_token_ids=False, hide_token_ids=False, event_max_bytes=LARGE, response_max_bytes=LARGE)
CLIENT_ASKS = Watch(learn_token_ids=True, hide_token_ids=False, event_max_bytes=LARGE, response_max_bytes=LARGE)


def recordings(*folders: str) -> list[Any]:
    paths = [path for folder in folders for path in sorted((RECORDINGS / folder).glob("*.http-body"))]
    paths = [path for path in paths if "two-choices" not in path.name]
    return [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in paths]


EVERY = recordings("stock", "stream-handle", "digest", "derived-0.33")
STREAMS = [param for param in EVERY if "stream-" in Path(str(param.values[0])).name]


def watch_for(path: Path) -> Watch:
    """The way kvloop would have asked for this answer."""
    return ASKS_NOTHING if path.parent.name == "digest" else ASKS


def fold_for(path: Path) -> TurnFold:
    return (StreamedTurn if "-stream-" in path.name else WholeTurn)(watch_for(path))


def feed(fold: TurnFold, pieces: list[bytes]) -> tuple[bytes, Learned]:
    """Feed pieces and an empty end, as HTTP/1.1 upstreams do; return the client's bytes and what was learnt."""
    out = b""
    for piece in pieces:
        replaced = fold.feed(piece, end=False)
        out += piece if replaced is None else replaced
    replaced = fold.feed(b"", end=True)
    return out + (replaced or b""), fold.learned


def messages(body: bytes) -> list[Any]:
    """An independent reader: every JSON message of a response in LF-only SSE, or of a whole one."""
    texts = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"]
    return [json.loads(text) for text in (texts or [body])]


def naturally(message: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    """The message as the client would have got it from vLLM, had nobody asked for ids or handles."""
    natural = json.loads(json.dumps(message))
    for holder in [natural, *natural.get("choices", [])]:
        for key in ("token_ids", "prompt_token_ids"):
            if key in holder:
                holder[key] = None
    if natural.get("kv_transfer_params") is not None:
        if streamed:
            del natural["kv_transfer_params"]
        else:
            natural["kv_transfer_params"] = None
    return natural


@pytest.mark.parametrize("path", EVERY)
def test_hazard_49_the_client_gets_what_vllm_sends_when_nobody_asks(path: Path) -> None:
    body = path.read_bytes()
    client, _ = feed(fold_for(path), [body])
    streamed = "-stream-" in path.name
    expected = [
        naturally(message, streamed=streamed and path.parent.name != "derived-0.33") for message in messages(body)
    ]
    if streamed and path.parent.name == "derived-0.33":
        # 0.33 writes the key on every chat chunk; where others show null, the last one does, too.
        shows_null = b'"kv_transfer_params":null' in body
        expected = [naturally(message, streamed=not shows_null) for message in messages(body)]
    assert messages(client) == expected
    assert client.count(b"\n") == body.count(b"\n")


@pytest.mark.parametrize("path", EVERY)
def test_the_handle_and_the_tokens_behind_it_are_learnt(path: Path) -> None:
    body = path.read_bytes()
    _, learned = feed(fold_for(path), [body])
    index = json.loads((RECORDINGS / "index.json").read_text())
    if learned.published is None:
        # A stop string looks like an abort to the engine; a stock 0.32 streams no handle at all.
        assert "stop-string" in path.name or path.parent.name == "stock"
        assert b'"remote_block_ids"' not in body
        return
    publication = read_publication(learned.published)
    if path.parent.name == "digest":
        assert publication.sequence is not None
        assert publication.sequence.length == publication.handle.tokens
        return
    assert learned.prompt_ids is not None
    ids = learned.prompt_ids + learned.generated_ids
    assert len(ids) - 1 == publication.handle.tokens
    assert index


@pytest.mark.parametrize(
    ("plain", "digest"),
    [(f"stream-handle/{n}", f"digest/{n}") for n in ("chat-stream-plain", "completions-full-plain", "chat-full-plain")],
)
def test_d_s_digest_and_d_s_token_ids_say_the_same(plain: str, digest: str) -> None:
    """The same prompt at temperature 0 was recorded both ways: the plugin's digest is that of the ids a stock D sends."""
    ids_path, digest_path = RECORDINGS / f"{plain}.http-body", RECORDINGS / f"{digest}.http-body"
    _, by_ids = feed(fold_for(ids_path), [ids_path.read_bytes()])
    _, by_digest = feed(fold_for(digest_path), [digest_path.read_bytes()])
    assert by_ids.prompt_ids is not None
    assert by_digest.published is not None
    held = fingerprint((by_ids.prompt_ids + by_ids.generated_ids)[:-1])
    assert read_publication(by_digest.published).sequence == held


@pytest.mark.parametrize("path", EVERY)
def test_hazard_19_every_cut_gives_the_same_outcome_and_the_same_client_bytes(path: Path) -> None:
    body = path.read_bytes()
    whole = feed(fold_for(path), [body])
    every_cut = path.stem in {"chat-stream-plain", "chat-full-plain"} and path.parent.name in {
        "digest",
        "stream-handle",
    }
    near_handle = {at + d for at in find_all(body, b'"kv_transfer_params"', b"[DONE]") for d in range(-3, 24)}
    cuts = set(range(len(body))) if every_cut else near_handle | set(range(0, len(body), 211))
    for cut in sorted(cuts):
        if 0 <= cut <= len(body):
            assert feed(fold_for(path), [body[:cut], body[cut:]]) == whole, cut
    assert feed(fold_for(path), [body[at : at + 1] for at in range(len(body))]) == whole


def find_all(body: bytes, *words: bytes) -> list[int]:
    found = []
    for word in words:
        at = body.find(word)
        while at >= 0:
            found.append(at)
            at = body.find(word, at + 1)
    return found


@pytest.mark.parametrize("path", STREAMS)
def test_hazard_20_an_event_leaves_with_its_last_byte(path: Path) -> None:
    fold = fold_for(path)
    for event in path.read_bytes().split(b"\n\n")[:-1]:
        replaced = fold.feed(event + b"\n\n", end=False)
        assert (event if replaced is None else replaced).strip() != b""


@pytest.mark.parametrize("path", recordings("digest"))
def test_a_digest_stream_is_untouched_up_to_the_handle(path: Path) -> None:
    """Every chunk but the last is answered with the same constant."""
    if "-full-" in path.name:
        return
    fold = fold_for(path)
    for event in path.read_bytes().split(b"\n\n")[:-1]:
        replaced = fold.feed(event + b"\n\n", end=False)
        assert (replaced is None) == (b"remote_block_ids" not in event)


def test_a_client_that_asked_for_ids_sees_them() -> None:
    body = (RECORDINGS / "stream-handle/chat-stream-plain.http-body").read_bytes()
    client, learned = feed(StreamedTurn(CLIENT_ASKS), [body])
    assert b'"token_ids":[44]' in client
    assert learned.generated_ids[0] == 44
    assert b"remote_block_ids" not in client


@pytest.mark.parametrize(
    "spelling", ['"kv_transfer_params" : ', '"kv_transfer_p\\u0061rams":', '"\\u006bv_transfer_params": ']
)
@pytest.mark.parametrize("watch", [ASKS, ASKS_NOTHING])
def test_hazard_34_the_handle_is_found_and_stripped_however_its_key_is_spelt(spelling: str, watch: Watch) -> None:
    body = f'data: {{"choices": [], {spelling}{json.dumps(handle_params(5))} }}\n\n'.encode()
    client, learned = feed(StreamedTurn(watch), [body])
    assert learned.published is not None
    assert json.loads(learned.published) == handle_params(5)
    assert client == b'data: {"choices": [] }\n\n'


@pytest.mark.parametrize("watch", [ASKS, ASKS_NOTHING])
def test_hazard_34_the_same_words_inside_text_are_text(watch: Watch) -> None:
    text = 'kv_transfer_params":{"a":1},"token_ids":[1,2] \u0001'
    body = sse({"choices": [{"index": 0, "delta": {"content": text}}]})
    client, learned = feed(StreamedTurn(watch), [body])
    assert client == body
    assert learned == Learned()


def test_hazard_34_null_on_every_chunk_is_nothing_yet_and_stays() -> None:
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"kv_transfer_params":null}\n\n'
    fold = StreamedTurn(ASKS_NOTHING)
    assert fold.feed(chunk, end=False) is None
    last = b'data: {"choices":[],"kv_transfer_params":' + orjson.dumps(handle_params(5)) + b"}\n\n"
    assert fold.feed(last, end=False) == b'data: {"choices":[],"kv_transfer_params":null}\n\n'


def test_hazard_35_the_handle_survives_a_usage_chunk_after_it() -> None:
    body = sse({"choices": [{"index": 0}], "kv_transfer_params": handle_params(5)}, {"choices": [], "usage": {"x": 1}})
    _, learned = feed(StreamedTurn(ASKS), [body])
    assert learned.published == orjson.dumps(handle_params(5))


def test_hazard_37_a_character_cut_in_two_arrives_whole() -> None:
    body = sse({"choices": [{"index": 0, "delta": {"content": "æøå"}, "token_ids": [1]}]})
    at = body.index("ø".encode()) + 1
    client, _ = feed(StreamedTurn(ASKS), [body[:at], body[at:]])
    assert "æøå".encode() in client


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b": ping\n\n", b"event: x\n", b"id: 7\nretry: 5\n"])
@pytest.mark.parametrize("space", [b"", b" "])
def test_hazard_38_every_dialect_of_server_sent_events_is_read(line_end: bytes, prefix: bytes, space: bytes) -> None:
    message = orjson.dumps({"choices": [], "kv_transfer_params": handle_params(5)})
    body = (prefix + b"data:" + space + message + b"\n\n").replace(b"\n", line_end)
    for cut in range(len(body)):
        client, learned = feed(StreamedTurn(ASKS), [body[:cut], body[cut:]])
        assert learned.published == orjson.dumps(handle_params(5))
        assert client.startswith(prefix.replace(b"\n", line_end))
        assert b"remote" not in client


def test_hazard_38_data_over_several_lines_is_one_message() -> None:
    text = json.dumps({"choices": [], "kv_transfer_params": handle_params(5)}, indent=1).encode()
    body = b"".join(b"data: " + line + b"\n" for line in text.split(b"\n")) + b"\n"
    client, learned = feed(StreamedTurn(ASKS), [body])
    assert json.loads(learned.published or b"") == handle_params(5)
    assert json.loads(client.replace(b"data: ", b"")) == {"choices": []}


def test_hazard_38_a_last_event_without_empty_line_is_read() -> None:
    body = b"data: " + orjson.dumps({"choices": [], "kv_transfer_params": handle_params(5)})
    client, learned = feed(StreamedTurn(ASKS), [body])
    assert learned.published is not None
    assert client == b'data: {"choices":[]}'


def test_hazard_44_a_handle_is_learnt_byte_for_byte() -> None:
    raw = b'{"remote_blocks_expiry_time":12345.678901234,"x_new":[1e400,{"a":"\\u00e9"}], "do_remote_decode":true}'
    _, learned = feed(StreamedTurn(ASKS), [b'data: {"kv_transfer_params":' + raw.replace(b"1e400", b"1e40") + b"}\n\n"])
    assert learned.published == raw.replace(b"1e400", b"1e40")


def test_hazard_49_chunks_vllm_sends_only_for_our_sake_do_not_reach_the_client() -> None:
    """A parser that swallows a token makes vLLM send an empty chunk when ids are asked for, and none otherwise."""
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [7]}
    body = sse({"choices": [choice]})
    client, learned = feed(StreamedTurn(ASKS), [body])
    assert client == b"data: [DONE]\n\n"
    assert learned.generated_ids == [7]
    assert feed(StreamedTurn(CLIENT_ASKS), [body])[0] == body
    # The same, spelt so that the short way does not know it.
    client, learned = feed(StreamedTurn(ASKS), [body.replace(b"data: ", b"data:")])
    assert client == b"data:[DONE]\n\n"
    assert learned.generated_ids == [7]


@pytest.mark.parametrize(
    "change",
    [{"finish_reason": "stop"}, {"logprobs": {"content": []}}, {"delta": {"content": ""}}, {"token_ids": None}],
)
def test_hazard_49_other_chunks_do(change: dict[str, Any]) -> None:
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [7]} | change
    client, _ = feed(StreamedTurn(ASKS), [sse({"choices": [choice]})])
    assert len(messages(client)) == 1


@pytest.mark.parametrize("text", [b"not json kv_transfer_params", b'"token_ids"', b"[1]", b'{"token_ids', b"[DONE]"])
def test_hazard_19_what_cannot_be_read_is_forwarded_as_it_came(text: bytes) -> None:
    body = b"data: " + text + b"\n\n"
    assert feed(StreamedTurn(ASKS), [body])[0] == body
    assert feed(WholeTurn(ASKS), [text])[0] == text


def test_odd_shapes_are_left_alone() -> None:
    body = sse({"choices": {"token_ids": 1}, "token_ids": [1]}, {"choices": [5, {"token_ids": [1]}], "x": 1})
    client, _ = feed(StreamedTurn(ASKS), [body])
    assert messages(client) == [
        {"choices": {"token_ids": 1}, "token_ids": [1]},
        {"choices": [5, {"token_ids": None}], "x": 1},
    ]


def test_a_whole_answer_is_held_up_to_its_bound() -> None:
    fold = WholeTurn(Watch(learn_token_ids=True, hide_token_ids=True, event_max_bytes=10, response_max_bytes=10))
    assert fold.feed(b"12345", end=False) == b""
    with pytest.raises(ResponseTooLarge):
        fold.feed(b"678901", end=False)


@given(st.lists(st.integers(0, 1200), max_size=30))
def test_any_number_of_cuts_changes_nothing(cuts: list[int]) -> None:
    path = RECORDINGS / "stream-handle/chat-stream-usage.http-body"
    body = path.read_bytes()
    at = [0, *sorted(min(cut * 7, len(body)) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(at)]
    assert feed(fold_for(path), pieces) == feed(fold_for(path), [body])


IDS = st.one_of(st.none(), st.lists(st.integers(0, 2**31), max_size=3))
CHOICE = st.fixed_dictionaries(
    {"index": st.just(0)},
    optional={
        "delta": st.sampled_from([{}, {"content": " a"}, {"content": '"token_ids":[1]'}, {"token_ids": [7]}]),
        "finish_reason": st.sampled_from([None, "stop"]),
        "logprobs": st.sampled_from([None, {"content": []}]),
        "prompt_token_ids": IDS,
        "token_ids": IDS,
    },
)
CHUNK = st.fixed_dictionaries(
    {"choices": st.one_of(st.lists(CHOICE, max_size=2), st.just([1]), st.none())},
    optional={
        "prompt_token_ids": IDS,
        "token_ids": IDS,
        "kv_transfer_params": st.sampled_from([None, {"remote_num_tokens": 3}]),
        "usage": st.just({"prompt_tokens": 1}),
    },
)


@given(chunk=CHUNK, spaced=st.booleans())
def test_the_usual_chunk_is_told_from_all_others_and_treated_alike(chunk: dict[str, Any], spaced: bool) -> None:
    # Without the space after the colon an event takes the general way.
    text = json.dumps(chunk).encode() if spaced else orjson.dumps(chunk)
    short, general = (StreamedTurn(Watch(True, True, 1 << 20, 1 << 20)) for _ in range(2))
    got, learned = feed(short, [b"data: " + text + b"\n\n"])
    wanted, also_learned = feed(general, [b"data:" + text + b"\n\n"])
    assert got.removeprefix(b"data: ") == wanted.removeprefix(b"data:")
    assert learned == also_learned


def test_what_only_looks_like_the_usual_chunk_is_forwarded_as_it_came() -> None:
    event = b'data: {"choices":[{"token_ids":[1]}]}}\n\n'
    assert feed(StreamedTurn(Watch(True, True, 1 << 20, 1 << 20)), [event])[0] == event


@pytest.mark.parametrize("fold", [StreamedTurn(ASKS), WholeTurn(ASKS)])
def test_a_fold_tells_whether_it_holds_bytes_back(fold: TurnFold) -> None:
    assert not fold.holds_bytes
    fold.feed(b"data: {", end=False)
    assert fold.holds_bytes


HANDLE_EVENT = sse({"choices": [], "kv_transfer_params": handle_params(64)}).removesuffix(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "stream",
    [
        b': "kv_transfer_params":null\n\n' + HANDLE_EVENT,
        b'"kv_transfer_params":null\n\n' + HANDLE_EVENT,
        b'data: {"a":{"kv_transfer_params":null}}\n\n' + HANDLE_EVENT,
        HANDLE_EVENT + b'data: {"choices":[],"kv_transfer_params":null}\n\n',
        HANDLE_EVENT + b'data: {"kv_transfer_params": null}\n\n' + HANDLE_EVENT,
    ],
)
@pytest.mark.parametrize("watch", [ASKS, ASKS_NOTHING, CLIENT_ASKS])
def test_hazard_19_34_a_null_that_is_no_member_or_comes_late_is_the_same_in_every_cut(
    stream: bytes, watch: Watch
) -> None:
    """Whether a handle leaves a null behind must not depend on what else came in the same piece."""
    expected = feed(StreamedTurn(watch), [stream])
    for cut in range(1, len(stream)):
        assert feed(StreamedTurn(watch), [stream[:cut], stream[cut:]]) == expected
