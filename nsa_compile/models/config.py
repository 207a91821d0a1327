"""The shape of a Native Sparse Attention model, as plain data.

Frozen standard-library dataclasses that validate themselves. This file imports no torch, so a command line can check a
model's configuration before paying for the import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar, get_args

from nsa_compile.branches import BRANCHES, Branch
from nsa_compile.models.variant import REGISTERED, AttentionVariant, find

IndexConvention = Literal["minus", "paper_v2"]
Phi = Literal["mlp", "mean"]
# No dimension of a tensor is larger.
MAX_SIZE = 2**31 - 1


class _AttentionName:
    """Lists the attentions in the schema of a configuration, for whoever asks a class of pydantic for one."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(core_schema), "enum": list(REGISTERED)}


def _require_int(owner: object, name: str, minimum: int) -> None:
    value = getattr(owner, name)
    # bool is an int to Python; `n_layers: true` is a mistake all the same.
    if type(value) is not int:
        raise ValueError(f"{name} = {value!r} must be an integer")
    if value < minimum:
        raise ValueError(f"{name} = {value} must be at least {minimum}")
    if value > MAX_SIZE:
        raise ValueError(f"{name} = {value} must be at most {MAX_SIZE}")


def _require_choice(owner: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{name} = {value!r} must be one of {', '.join(choices)}")


def _require_bool(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} must be true or false")


def _require_positive(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e300:
        raise ValueError(f"{name} = {value!r} must be a positive number")


def ordered_branches(branches: object) -> tuple[Branch, ...]:
    """Some of ``BRANCHES``, in their order.

    Raises:
        ValueError: what is given is no list of branches, or a branch lacks another that it needs.
    """
    if not isinstance(branches, list | tuple) or not branches or any(branch not in BRANCHES for branch in branches):
        given = list(branches) if isinstance(branches, tuple) else branches
        raise ValueError(f"branches = {given!r} must be a list of one or more of {', '.join(BRANCHES)}")
    if len(set(branches)) < len(branches):
        raise ValueError(f"branches = {list(branches)!r} must name each branch once")
    if "selected" in branches and "compressed" not in branches:
        raise ValueError(
            f"branches = {list(branches)!r} must include 'compressed', or 'selected' has nothing to select by"
        )
    return tuple(branch for branch in BRANCHES if branch in branches)


@dataclass(frozen=True)
class SparsePattern:
    """Which keys a query sees: the paper's block sizes and counts.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    compress_block: int = 32
    """Tokens pooled into one compressed key, ``l`` (eq. 7)."""
    compress_stride: int = 16
    """Tokens between the starts of neighbouring compressed blocks, ``d``; divides ``l`` and ``l'``."""
    select_block: int = 64
    """Tokens of one selection block, ``l'`` (eq. 9)."""
    num_selected: int = 16
    """Selection blocks that a query attends to, ``n``, those that are always selected included (eq. 11)."""
    window: int = 512
    """Tokens of the sliding window, ``w``, the query's own included (section 3.3.3)."""
    num_initial: int = 1
    """Blocks at the start of the sequence that are always selected; they count towards ``n``."""
    num_local: int = 2
    """Blocks up to and including the query's own that are always selected; they count towards ``n``."""
    index_convention: IndexConvention = "minus"
    """Index of the compressed block in eq. 9: minus is (l'/d)·j + m − n, paper_v2 the index as printed in the paper's
    second version, (l'/d)·j − m − n."""

    def __post_init__(self) -> None:
        for name in ("compress_block", "compress_stride", "select_block", "num_selected", "window", "num_local"):
            _require_int(self, name, 1)
        _require_int(self, "num_initial", 0)
        _require_choice(self, "index_convention", get_args(IndexConvention))
        for name, symbol in (("compress_block", "l"), ("select_block", "l'")):
            if getattr(self, name) % self.compress_stride:
                raise ValueError(
                    f"{name} = {getattr(self, name)} must be a multiple of compress_stride = {self.compress_stride} "
                    f"(the paper's d divides {symbol})"
                )
        if self.num_selected < self.num_initial + self.num_local:
            raise ValueError(
                f"num_selected = {self.num_selected} must be at least num_initial + num_local = "
                f"{self.num_initial} + {self.num_local}, because the blocks that are always selected count towards n"
            )


def check_attention(owner: object) -> None:
    """What an attention asks of the attributes of a model's configuration, or of a layer, that have its sizes.

    Raises:
        ValueError: naming the attribute, its value and the rule it breaks.
    """
    sizes: Any = owner
    for name in ("dim", "n_heads", "n_kv_heads", "head_dim"):
        _require_int(owner, name, 1)
    for name in ("v_head_dim", "phi_hidden"):
        if getattr(owner, name) is not None:
            _require_int(owner, name, 1)
    for name in ("shared_kv", "compress_rotated"):
        _require_bool(owner, name)
    _require_positive(owner, "rope_theta")
    _require_choice(owner, "phi", get_args(Phi))
    if not isinstance(sizes.pattern, SparsePattern):
        raise ValueError(f"pattern = {sizes.pattern!r} must be a SparsePattern")
    if sizes.n_heads % sizes.n_kv_heads:
        raise ValueError(f"n_heads = {sizes.n_heads} must be a multiple of n_kv_heads = {sizes.n_kv_heads}")
    if sizes.head_dim % 2:
        raise ValueError(f"head_dim = {sizes.head_dim} must be even, because RoPE rotates pairs of channels")


_Schema = TypeVar("_Schema", "NSAConfig", SparsePattern)


@dataclass(frozen=True)
class NSAConfig:
    """A decoder-only transformer whose attention is NSA, or dense for comparison.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    vocab_size: int
    """Number of token ids, ``V``."""
    dim: int
    """Width of the residual stream."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Number of query heads, ``Hq``."""
    n_kv_heads: int
    """Number of key/value heads, ``G``; each serves ``Hq / G`` query heads, which select the same blocks (eq. 10)."""
    head_dim: int
    """Width of a query or key head, ``d_k``; even, because RoPE rotates pairs."""
    v_head_dim: int | None = None
    """Width of a value head, ``d_v``; null takes head_dim."""
    pattern: SparsePattern = field(default_factory=SparsePattern)
    """Block sizes and counts."""
    phi: Phi = "mlp"
    """How a block is compressed (eq. 7): by an MLP with a position embedding within the block, or by the mean."""
    shared_kv: bool = False
    """Whether the three branches share one key/value projection; the paper has one for each."""
    compress_rotated: bool = False
    """Whether keys are compressed after RoPE has turned them, and meet a query that is turned, too, as in the models of
    flash-linear-attention."""
    branches: tuple[Branch, ...] = BRANCHES
    """Branches of eq. 5 that the model has; others have no parameters and add nothing. selected needs compressed, from
    whose weights it selects."""
    attention: Annotated[str, _AttentionName()] = "nsa"
    """Attention of the model: nsa, or dense for causal attention over all tokens."""
    mlp_hidden: int | None = None
    """Hidden width of the SwiGLU feed-forward; null takes 8/3 · dim, rounded up to a multiple of 32."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = False
    """Whether the output projection shares the embedding's weight."""
    phi_hidden: int | None = None
    """Hidden width of the compression MLP; null takes twice the head's width."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layers"):
            _require_int(self, name, 1)
        if self.mlp_hidden is not None:
            _require_int(self, "mlp_hidden", 1)
        _require_bool(self, "tie_embeddings")
        _require_positive(self, "norm_eps")
        _require_choice(self, "attention", tuple(REGISTERED))
        object.__setattr__(self, "branches", ordered_branches(self.branches))
        check_attention(self)
        if mistake := self.variant.mistake(self):
            raise ValueError(mistake)

    @property
    def variant(self) -> AttentionVariant:
        """All that is known of the model's attention."""
        return find(self.attention)

    @property
    def value_dim(self) -> int:
        """Width of a value head, ``d_v``."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the SwiGLU feed-forward."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        return -(-8 * self.dim // (3 * 32)) * 32


def from_plain(schema: type[_Schema], values: Mapping[str, Any]) -> _Schema:
    """One of the dataclasses above from a mapping, such as its ``asdict``.

    Raises:
        ValueError: a field is missing, unknown or not what it must be; the message begins with the dotted field.
    """
    values = dict(values)
    if isinstance(values.get("pattern"), Mapping):
        try:
            values["pattern"] = from_plain(SparsePattern, values["pattern"])
        except ValueError as error:
            raise ValueError(f"pattern.{error}") from None
    if missing := [name for name in required(schema) if name not in values]:
        others = f", and so are {', '.join(missing[1:])}" if missing[1:] else ""
        raise ValueError(f"{missing[0]} is missing and has no default{others}")
    known = [field.name for field in fields(schema)]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"{unknown[0]} is not one of {', '.join(known)}")
    return schema(**values)


def required(schema: type[NSAConfig] | type[SparsePattern]) -> list[str]:
    """The fields without a default."""
    return [field.name for field in fields(schema) if field.default is MISSING and field.default_factory is MISSING]
