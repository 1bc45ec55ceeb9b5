"""From ids to text, on a small vocabulary with a token for every byte."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import WordLevel

from kernel_steer.detokenize import TextStream

WORDS = ["<eos>", "<unk>", "▁Hello", "▁wor", "ld", "!", "END", "STOP", "▁"]
FIRST_BYTE = len(WORDS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = WORDS + [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return made


def bytes_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push([token]) for token in ids]


def test_it_works(tokenizer: Tokenizer) -> None:
    assert pieces(TextStream(tokenizer), [2, 3, 4, 5]) == [" Hello", " wor", "ld", "!"]


def test_a_character_of_many_tokens_comes_when_it_is_whole(tokenizer: Tokenizer) -> None:
    assert pieces(TextStream(tokenizer), [2, *bytes_of("😀"), 5]) == [" Hello", "", "", "", "😀", "!"]


def test_control_tokens_are_silent(tokenizer: Tokenizer) -> None:
    assert pieces(TextStream(tokenizer), [2, 0, 4]) == [" Hello", "", "ld"]


def test_any_bytes_at_all_give_text_and_never_an_error(tokenizer: Tokenizer) -> None:
    chance = random.Random(7)
    for _ in range(300):
        ids = [
            chance.choice([2, 4, 0, *bytes_of("é😀")])
            if chance.random() < 0.5
            else FIRST_BYTE + chance.randrange(256)
            for _ in range(30)
        ]
        text = "".join(pieces(TextStream(tokenizer), [*ids, 2]))
        assert text.endswith(" Hello")


def test_a_stray_byte_does_not_take_back_what_was_shown(tokenizer: Tokenizer) -> None:
    shown = pieces(TextStream(tokenizer), [*bytes_of("😀"), FIRST_BYTE + 0x80, 2, 5])
    assert "".join(shown) == "😀\ufffd Hello!"


def test_a_stop_string_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["ENDSTOP"])
    assert pieces(stream, [2, 6]) == [" Hello", ""]
    assert stream.stop_string is None
    assert stream.push([7]) == ""
    assert stream.stop_string == "ENDSTOP"


def test_what_only_looked_like_a_stop_string_is_shown_after_all(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["ENDSTOP"])
    assert pieces(stream, [6, 6, 4]) == ["", "END", "ENDld"]
    assert stream.stop_string is None


def test_text_kept_back_is_not_lost_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["ENDSTOP"])
    assert stream.push([2, 6]) == " Hello"
    assert stream.flush() == "END"
    assert stream.flush() == ""


def test_the_first_of_several_stop_strings_counts(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["!", "world"])
    assert stream.push([2, 3, 4, 5]) == " Hello "
    assert stream.stop_string == "world"


def test_a_stop_string_counts_only_behind_the_least_number_of_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["l"], min_tokens=3)
    assert pieces(stream, [2, 3, 4, 2]) == [" Hello", " wor", "ld", " He"]
    assert stream.stop_string == "l"


def test_a_stop_string_may_begin_within_the_least_number_of_tokens(tokenizer: Tokenizer) -> None:
    early, late = (TextStream(tokenizer, ["STOP"], min_tokens=count) for count in (1, 2))
    assert (pieces(early, bytes_of("STOP")), early.stop_string) == (["", "", "", ""], "STOP")
    assert pieces(late, [7, 7, 7]) == ["STOP", "STOP", ""]
    assert late.stop_string == "STOP"


def test_ids_that_come_at_once_stop_where_they_would_one_by_one(tokenizer: Tokenizer) -> None:
    ids = [2, 3, 4, 2, 3, 4, 5]
    for least in range(len(ids) + 1):
        one_by_one, at_once = (TextStream(tokenizer, ["ld", "o w"], min_tokens=least) for _ in range(2))
        text = ""
        for token in ids:
            if one_by_one.stop_string is None:
                text += one_by_one.push([token])
        assert (text, one_by_one.stop_string) == (at_once.push(ids), at_once.stop_string)
