"""Documents that share a sequence, and padding: which tokens belong together, as rows that hold one document each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The shortest row that is filled up; a program is compiled for each length of rows.
_LEAST = 32
# More shapes of rows than documents in batches of up to 16,384 tokens can have.
SHAPES = 256


class Documents(NamedTuple):
    """The documents of a batch of tokens `[B, S]`, as rows with one document each.

    A document counts positions and blocks from its own first token and sees nothing of another one, so it gives what it
    gives alone. That needs no mask: each becomes a row of a batch, as if it were alone, filled up at its end. What is
    causal does not see what follows, so the real tokens of a row do not see its end.

    Rows are filled up to the next of eight lengths to each power of two: 32, 36, 40, ..., 64, 72, ..., 512, 576, ...
    Documents of one of these lengths are not filled up, others above 32 by less than an eighth. Rows of one length are
    one batch, or several of 1, 4, 16, ... rows. So however lengths vary, a compiled function meets few shapes `[N, L]`.

    Made by `Documents.of`, once a batch: it reads the values of what it is given, which waits for the device. A tuple
    of tensors, it can be given to a compiled function, where each set of shapes of its rows is a program of its own.
    """

    rows: tuple[Tensor, ...]  # [N, L] int64 each: the token of B · S at each place; past its end a document's last one
    place: Tensor  # [B, S] int64: where in the rows, one after the other, each token is
    real: Tensor | None  # [B, S] bool: False for padding, which no row has; None where there is none

    @staticmethod
    def of(
        *,
        attention_mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Documents:
        """The documents that one of these tells of, or `doc_ids` with an `attention_mask`.

        Args:
            attention_mask: `[B, S]` bool, or integers 0 and 1: 1 for a real token, 0 for padding. The real tokens of a
                row stand side by side, with padding at its left or right or both; without `doc_ids` they are one
                document.
            doc_ids: `[B, S]` integers: tokens of a row with the same number are one document, and stand side by side.
            cu_seqlens: `[n + 1]` integers, from 0 to S: where in a batch `[1, S]` each document starts, and S.
            device: of the batch; that of these tensors by default. Where they lie on the CPU, nothing waits.

        Raises:
            ValueError: a tensor of another shape or dtype, or with values against these rules, or of no document.
        """
        if torch.compiler.is_compiling():
            _refuse_capture(
                "attention_mask, doc_ids and cu_seqlens are read on the host, and a compiled function does not know "
                "their values; make documents = Documents.of(...) before it and pass layer(x, documents=documents), or "
                "compile the layer with nsa_compile.compile_block(layer)"
            )
        if cu_seqlens is not None:
            if attention_mask is not None or doc_ids is not None:
                raise ValueError("cu_seqlens tells of every token; give it without attention_mask and doc_ids")
            starts, lengths, shape = _from_cu_seqlens(cu_seqlens)
            return _arranged(starts, lengths, shape, device or cu_seqlens.device)
        given = [x for x in (attention_mask, doc_ids) if x is not None]
        if not given:
            raise ValueError("Documents.of needs attention_mask, doc_ids or cu_seqlens")
        starts, lengths = _runs(attention_mask, doc_ids)
        batch, length = given[0].shape
        return _arranged(starts, lengths, (batch, length), device or given[0].device)

    def unpack(self, x: Tensor) -> list[Tensor]:
        """The rows `[N, L, ...]` of a batch `[B, S, ...]`."""
        if x.shape[:2] != self.place.shape:
            raise ValueError(
                f"x has shape {list(x.shape)}; the documents are of {list(self.place.shape)} tokens [B, S], which must "
                "be its first two sizes"
            )
        tokens = x.flatten(0, 1)
        return [tokens.index_select(0, rows.flatten()).unflatten(0, rows.shape) for rows in self.rows]

    def pack(self, rows: Sequence[Tensor]) -> Tensor:
        """The batch `[B, S, ...]` of rows `[N, L, ...]`, as many as `unpack` gives; zeros for padding."""
        places = torch.cat([row.flatten(0, 1) for row in rows]) if len(rows) > 1 else rows[0].flatten(0, 1)
        x = places.index_select(0, self.place.flatten()).unflatten(0, self.place.shape)
        if self.real is None:
            return x
        return x.masked_fill(~self.real[(..., *[None] * (x.dim() - 2))], 0)


def _refuse_capture(message: str) -> None:
    from nsa_compile.capture.refusals import ScanRefused

    raise ScanRefused(message)


# Dynamo runs it while it traces; the mark is that of `torch.compiler.assume_constant_result`.
_refuse_capture._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]


def _from_cu_seqlens(cu_seqlens: Tensor) -> tuple[list[int], list[int], tuple[int, int]]:
    """Starts and lengths of the documents, and the shape of the batch."""
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            f"cu_seqlens is a {type(cu_seqlens).__name__}; it must be a tensor of integers [documents + 1]"
        )
    _require_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [documents + 1], [2] at least")
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if ends[0] != 0 or min(lengths) < 1:
        wrong = 0 if ends[0] else next(i + 1 for i, length in enumerate(lengths) if length < 1)
        raise ValueError(
            f"cu_seqlens[{wrong}] = {ends[wrong]}; cu_seqlens must start with 0 and rise, a document having at least "
            "one token"
        )
    return ends[:-1], lengths, (1, ends[-1])


def _runs(attention_mask: Tensor | None, doc_ids: Tensor | None) -> tuple[list[int], list[int]]:
    """Starts, in the batch as one sequence of B · S tokens, and lengths of its documents."""
    if doc_ids is not None:
        _require_integers("doc_ids", doc_ids)
        _require_batch("doc_ids", doc_ids)
        ids = doc_ids.cpu().to(torch.int64)
    if attention_mask is not None:
        _require_batch("attention_mask", attention_mask)
        real = _real(attention_mask.cpu())
    else:
        real = torch.ones_like(ids, dtype=torch.bool)
    if doc_ids is None:
        ids = torch.zeros_like(real, dtype=torch.int64)
    if ids.shape != real.shape:
        raise ValueError(
            f"attention_mask has shape {list(real.shape)} and doc_ids {list(ids.shape)}; they must be of one batch"
        )
    first = torch.ones_like(real)
    first[:, 1:] = (ids[:, 1:] != ids[:, :-1]) | (real[:, 1:] != real[:, :-1])
    runs = first.flatten().nonzero().flatten()
    lengths = torch.diff(runs, append=torch.tensor([real.numel()]))
    kept = real.flatten()[runs]
    starts, lengths = runs[kept], lengths[kept]
    if not len(starts):
        raise ValueError("attention_mask keeps no token of the batch; leave such a batch out")
    seen: set[tuple[int, int]] = set()
    for start, number in zip(starts.tolist(), ids.flatten()[starts].tolist(), strict=True):
        row, position = divmod(start, real.shape[1])
        if (row, number) in seen:
            raise ValueError(_torn(row, position, None if doc_ids is None else number))
        seen.add((row, number))
    return starts.tolist(), lengths.tolist()


def _torn(row: int, position: int, number: int | None) -> str:
    if number is None:
        return (
            f"attention_mask has a hole in row {row}, which ends before position {position}; the real tokens of a row "
            "must stand side by side, with padding at the left or right; give several documents as doc_ids"
        )
    return (
        f"document {number} of doc_ids goes on at position {position} of row {row} after an interruption; the tokens "
        "of a document must stand side by side; give other documents other numbers"
    )


def _real(attention_mask: Tensor) -> Tensor:
    if attention_mask.dtype == torch.bool:
        return attention_mask
    _require_integers("attention_mask", attention_mask)
    if (other := attention_mask[(attention_mask != 0) & (attention_mask != 1)]).numel():
        raise ValueError(f"attention_mask holds {other[0].item()}; it must be 1 for a real token and 0 for padding")
    return attention_mask == 1


def _require_integers(name: str, x: Tensor) -> None:
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        also = " or bool" if name == "attention_mask" else ""
        raise ValueError(f"{name} has dtype {x.dtype}; it must be of integers{also}, as x.to(torch.int64) is")


def _require_batch(name: str, x: Tensor) -> None:
    if x.dim() != 2 or not x.numel():
        raise ValueError(
            f"{name} has shape {list(x.shape)}; it must be [B, S], a value for each token, and no token attends to a "
            "later one whatever it says"
        )


def _arranged(
    starts: Sequence[int], lengths: Sequence[int], shape: tuple[int, int], device: torch.device | str
) -> Documents:
    """Rows of documents that are `lengths` long, and have their first tokens at `starts` of the batch's B · S."""
    rows = []
    place = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
    real = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    places = 0
    for size, documents in _batches(lengths):
        start, length = (torch.tensor([of[i] for i in documents])[:, None] for of in (starts, lengths))
        position = torch.arange(size)
        # Its own last token fills a row up: not even a NaN of one document comes near another one.
        row = start + position.clamp(max=length - 1)
        inside = position < length
        place[row[inside]] = places + inside.flatten().nonzero().flatten()
        real[row[inside]] = True
        places += row.numel()
        rows.append(row.to(device))
    return Documents(
        tuple(rows), place.view(shape).to(device), None if bool(real.all()) else real.view(shape).to(device)
    )


def _batches(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """How long the rows of each batch are, and which documents it has: a power of four of them."""
    like: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        like.setdefault(row_length(length), []).append(i)
    for length, documents in sorted(like.items()):
        while documents:
            size = 1
            while 4 * size <= len(documents):
                size *= 4
            yield length, documents[:size]
            documents = documents[size:]


def row_length(length: int) -> int:
    """The length of the row of a document: the next of 32, 36, 40, 44, ..., 64, 72, ..., 128, 144, ..."""
    power = max(_LEAST, 1 << (length.bit_length() - 1))
    step = power // 8
    return max(power, -(-length // step) * step)
