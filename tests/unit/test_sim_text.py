"""The simulated model's tokenizer, template and quirks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.sim import text
from workers.sim.text import Model, render_chat

USER = {"role": "user", "content": "Hello"}
PIECES = st.one_of(st.sampled_from([*text.WORDS, *text.SPECIAL_TOKENS]), st.text(max_size=8))


@given(st.lists(PIECES).map("".join))
def test_encoding_is_undone_by_decoding(said: str) -> None:
    said = said.encode("utf-8", "replace").decode()
    assert text.decode(text.encode(said), hide_special=False) == said


@given(st.lists(st.integers(text.FIRST_WORD, text.FIRST_PAIR - 1)))
def test_words_are_found_again_in_the_text_they_make(ids: list[int]) -> None:
    assert text.encode(text.decode(ids)) == ids


def test_a_pair_is_a_token_that_no_tokenizer_makes_of_its_text() -> None:
    said = text.decode([text.FIRST_PAIR])
    assert text.encode(said) == [text.FIRST_WORD, text.FIRST_PAIR - 1]


def test_every_token_has_a_text_and_clients_see_no_turn_marks() -> None:
    assert all(text.token_string(token) for token in range(256, 262))
    assert text.decode([text.IM_START, text.THINK, text.IM_END]) == "<think>"


def test_a_model_says_the_same_for_the_same_kv_and_other_things_for_other_kv() -> None:
    model = Model()
    said = {digest: model.next_token(bytes([digest]) * 16, 1) for digest in range(200)}
    assert said == {digest: model.next_token(bytes([digest]) * 16, 1) for digest in range(200)}
    assert len(set(said.values())) > 150


def test_a_model_may_not_end_before_it_is_allowed_to() -> None:
    model = Model(mean_answer_tokens=1)
    assert model.next_token(bytes(16), 3) == text.IM_END
    assert model.next_token(bytes(16), 0) != text.IM_END
    assert model.next_token(bytes(16), 3, may_end=False) != text.IM_END


def test_a_thinking_model_starts_with_a_thought() -> None:
    answer = [Model(thinks=True, mean_answer_tokens=1).next_token(bytes(16), generated) for generated in range(8)]
    assert answer[0] == text.THINK
    assert answer[6] == text.END_THINK


def test_a_chat_extends_its_own_earlier_prompt() -> None:
    earlier = render_chat([USER])
    later = render_chat([USER, {"role": "assistant", "content": "Hi"}, USER])
    assert later.startswith(earlier + "Hi<|im_end|>\n<|im_start|>user\n")


def test_thoughts_of_older_turns_are_dropped_when_the_template_does_so() -> None:
    told = [USER, {"role": "assistant", "content": "<think>so</think>\nHi"}, USER]
    assert "<think>" in render_chat(told)
    assert "<think>" not in render_chat(told, drops_thoughts=True)
    assert "<think>" in render_chat(told[:2], drops_thoughts=True)


def test_switched_off_thinking_shows_only_behind_the_last_turn_mark() -> None:
    assert render_chat([USER], enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")


def test_the_last_message_may_be_left_open() -> None:
    told = [USER, {"role": "assistant", "content": "I th"}]
    assert render_chat(told, continue_final_message=True).endswith("<|im_start|>assistant\nI th")
    assert render_chat([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_tools_and_tool_calls_are_part_of_the_prompt_letter_by_letter() -> None:
    def told(arguments: str) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}
        return render_chat(
            [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], tools=[{"name": "find"}]
        )

    assert '<tools>\n{"name": "find"}\n</tools>' in told("{}")
    assert told('{"city":"Oslo"}') != told('{"city": "Oslo"}')


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}, {"type": "image_url", "image_url": {}}]
    assert render_chat([{"role": "user", "content": parts}]) == render_chat([{**USER, "content": "Hello<|image|>"}])
