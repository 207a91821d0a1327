"""Text shown while its tokens arrive."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.generation.text import TextStream

decode = ByteTokenizer().decode
TEXTS = st.text(alphabet="ab\n é😀", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\né😀", min_size=1, max_size=3), max_size=3)


def shown(tokens: list[int], stops=(), end=()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stops, end)
    pieces = []
    for token in tokens:
        pieces.append(stream.feed(token))
        if stream.stopped_by:
            break
    return [*pieces, stream.finish()], stream


@given(text=TEXTS, stops=STOPS)
def test_what_is_shown_is_the_text_up_to_its_first_stop(text, stops):
    pieces, stream = shown(list(text.encode()), stops)
    ends = [n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)]
    wanted = text if not ends else text[: min(text.find(stop) for stop in stops if stop in text[: ends[0]])]
    assert "".join(pieces) == stream.text == wanted
    assert (stream.stopped_by == "stop") == bool(ends)
    assert not any("\ufffd" in piece for piece in pieces)


@example([128, 128, 128, 194, 128])  # the last two are a character, as bytes before them are not
@given(tokens=st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_form_no_character_are_shown_in_the_end(tokens):
    assert "".join(shown(tokens)[0]) == decode(tokens)


def test_a_character_is_shown_when_it_is_whole_and_a_stop_never():
    pieces, _ = shown(list("é\nok\n\n no".encode()), stops=["\n\n"])
    assert pieces == ["", "é", "", "\no", "k", "", "", ""]


def test_a_token_may_end_the_text():
    pieces, stream = shown([97, 98, 0, 99], end=[0])
    assert ("".join(pieces), stream.stopped_by) == ("ab", "end")
