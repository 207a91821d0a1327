"""The shape of a model, as plain data.

Frozen standard-library dataclasses that validate themselves. This file imports no torch, so a command line can check a
model's configuration before paying for the import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args

from nsa_compile.branches import BRANCHES, Branch
from nsa_compile.models.pattern import (
    MAX_SIZE,
    Pattern,
    SparsePattern,
    require_bool,
    require_choice,
    require_int,
    require_positive,
)
from nsa_compile.models.variant import REGISTERED, AttentionVariant, find

__all__ = ["MAX_SIZE", "NSAConfig", "SparsePattern", "check_attention", "from_plain", "ordered_branches", "required"]

Phi = Literal["mlp", "mean"]


class _AttentionName:
    """Lists the attentions in the schema of a configuration, for whoever asks a class of pydantic for one."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(core_schema), "enum": list(REGISTERED)}


class _AnyPattern:
    """Lists the classes of patterns in that schema, as ``oneOf``, each with its ``attentions``."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        from pydantic import TypeAdapter

        owners: dict[type[Pattern], list[str]] = {}
        for name in REGISTERED:
            owners.setdefault(find(name).pattern, []).append(name)
        return {"oneOf": [TypeAdapter(kind).json_schema() | {"attentions": of} for kind, of in owners.items()]}


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


def check_attention(owner: object, pattern: type[Pattern] = SparsePattern) -> None:
    """What an attention with a ``pattern`` asks of the attributes of a model's configuration, or of a layer, that have
    its sizes.

    Raises:
        ValueError: naming the attribute, its value and the rule it breaks.
    """
    sizes: Any = owner
    for name in ("dim", "n_heads", "n_kv_heads", "head_dim"):
        require_int(owner, name, 1)
    for name in ("v_head_dim", "phi_hidden"):
        if getattr(owner, name) is not None:
            require_int(owner, name, 1)
    for name in ("shared_kv", "compress_rotated"):
        require_bool(owner, name)
    require_positive(owner, "rope_theta")
    require_choice(owner, "phi", get_args(Phi))
    if not isinstance(sizes.pattern, pattern):
        raise ValueError(f"pattern = {sizes.pattern!r} must be a {pattern.__name__}")
    if sizes.n_heads % sizes.n_kv_heads:
        raise ValueError(f"n_heads = {sizes.n_heads} must be a multiple of n_kv_heads = {sizes.n_kv_heads}")
    if sizes.head_dim % 2:
        raise ValueError(f"head_dim = {sizes.head_dim} must be even, because RoPE rotates pairs of channels")


_Schema = TypeVar("_Schema", "NSAConfig", Pattern)


@dataclass(frozen=True)
class NSAConfig:
    """A decoder-only transformer whose attention is NSA, or another one that ``attention`` names.

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
    pattern: Annotated[Any, _AnyPattern()] = None
    """Sizes of the attention, of its own class of `Pattern`; null takes that class's defaults."""
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
    """Attention of the model: nsa, dense for causal attention over all tokens, one of docs/zoo.md, or hybrid for layers
    of different ones."""
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
            require_int(self, name, 1)
        if self.mlp_hidden is not None:
            require_int(self, "mlp_hidden", 1)
        require_bool(self, "tie_embeddings")
        require_positive(self, "norm_eps")
        require_choice(self, "attention", tuple(REGISTERED))
        object.__setattr__(self, "branches", ordered_branches(self.branches))
        if self.pattern is None:
            object.__setattr__(self, "pattern", self.variant.pattern())
        check_attention(self, self.variant.pattern)
        if mistake := self.variant.mistake(self):
            raise ValueError(mistake)

    @property
    def variant(self) -> AttentionVariant:
        """All that is known of the model's attention."""
        return find(self.attention)

    def layers(self) -> list[NSAConfig]:
        """This configuration as each layer has it, with the attention and the sizes of that layer."""
        return [self.variant.of_layer(self, index) for index in range(self.n_layers)]

    @property
    def auxiliary(self) -> bool:
        """Whether a layer has a loss of its own."""
        return any(layer.variant.auxiliary for layer in self.layers())

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
    attention = values.get("attention", NSAConfig.attention)
    if isinstance(values.get("pattern"), Mapping) and attention in tuple(REGISTERED):
        try:
            values["pattern"] = from_plain(find(attention).pattern, values["pattern"])
        except ValueError as error:
            raise ValueError(f"pattern.{error}") from None
    if missing := [name for name in required(schema) if name not in values]:
        others = f", and so are {', '.join(missing[1:])}" if missing[1:] else ""
        raise ValueError(f"{missing[0]} is missing and has no default{others}")
    known = [field.name for field in fields(schema)]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"{unknown[0]} is not one of {', '.join(known)}")
    return schema(**values)


def required(schema: type[NSAConfig] | type[Pattern]) -> list[str]:
    """The fields without a default."""
    return [field.name for field in fields(schema) if field.default is MISSING and field.default_factory is MISSING]
