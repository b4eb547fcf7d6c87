"""Trees of any size and kind, drawn by hypothesis, for what looks at shapes alone."""

from typing import Any

from hypothesis import strategies as st

from gptkit.components import (
    ALiBi,
    Attention,
    Block,
    Embedding,
    FeedForward,
    GatedFeedForward,
    Head,
    LatentAttention,
    LayerNorm,
    LearnedPositions,
    MixtureOfExperts,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
)

SIZES = st.sampled_from((1, 7, 48, 768, 4_096, 12_288, 131_072))
HEADS = st.sampled_from((1, 2, 4, 8, 12, 32, 71, 96))


def norms(size: int) -> st.SearchStrategy[LayerNorm | RMSNorm]:
    return st.one_of(
        st.builds(LayerNorm, size=st.just(size), eps=st.just(1e-5), bias=st.booleans()),
        st.builds(RMSNorm, size=st.just(size), eps=st.just(1e-6)),
    )


@st.composite
def attentions(draw: Any, hidden: int) -> Attention:
    kv_heads, group, head_dim = (
        draw(HEADS),
        draw(st.sampled_from((1, 2, 4, 16, 71))),
        draw(st.sampled_from((2, 8, 128))),
    )
    norm = RMSNorm(size=head_dim, eps=1e-6)
    rotary = Rotary(dim=draw(st.sampled_from((2, head_dim))), base=1e4)
    return Attention(
        hidden_size=hidden,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from((head_dim**-0.5, 1.0, 0.03125))),
        position=draw(st.sampled_from((None, ALiBi(), ALiBi(scaled=True), rotary))),
        window=draw(st.sampled_from((None, 1, 4_096))),
        q_norm=draw(st.sampled_from((None, norm))),
        k_norm=draw(st.sampled_from((None, norm))),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@st.composite
def latents(draw: Any, hidden: int) -> LatentAttention:
    rank, keys = draw(st.sampled_from((4, 512))), draw(st.sampled_from((0, 1, 2)))
    low, biases = (
        draw(st.sampled_from((None, 4, 512))),
        draw(st.sampled_from(((False, False), (True, False), (False, True)))),
    )
    plain = draw(st.sampled_from((None, ALiBi())))
    return LatentAttention(
        hidden_size=hidden,
        heads=draw(HEADS),
        kv_rank=rank,
        nope_dim=draw(st.sampled_from((0, 128) if keys else (128,))),
        value_dim=draw(st.sampled_from((2, 128))),
        scale=0.1,
        rope_heads=keys,
        position=Rotary(dim=draw(st.sampled_from((2, 64))), base=1e4) if keys else plain,
        window=draw(st.sampled_from((None, 4_096))),
        q_rank=low,
        q_norm=None if low is None else draw(st.sampled_from((None, RMSNorm(size=low, eps=1e-6)))),
        kv_norm=draw(st.sampled_from((None, RMSNorm(size=rank, eps=1e-6)))),
        qkv_bias=biases[0],
        kv_bias=biases[1],
        fused=draw(st.booleans()),
        output_bias=draw(st.booleans()),
    )


@st.composite
def feed_forwards(draw: Any, hidden: int) -> FeedForward | GatedFeedForward | MixtureOfExperts:
    kind = draw(st.sampled_from((FeedForward, GatedFeedForward)))
    one = kind(
        hidden_size=hidden,
        intermediate_size=draw(SIZES),
        activation=draw(st.sampled_from(("gelu_tanh", "silu"))),
        up_bias=draw(st.booleans()),
        down_bias=draw(st.booleans()),
    )
    experts = draw(st.sampled_from((0, 0, 1, 8, 256)))
    if not experts:
        return one
    top_k = draw(st.sampled_from(sorted({1, min(2, experts), experts})))
    return MixtureOfExperts(hidden_size=hidden, experts=experts, top_k=top_k, expert=one, normalise=draw(st.booleans()))


@st.composite
def blocks(draw: Any, hidden: int) -> Block:
    parallel = draw(st.booleans())
    return Block(
        sublayers=(
            SubLayer(mixer=draw(st.one_of(attentions(hidden), latents(hidden))), norm=draw(norms(hidden))),
            SubLayer(
                mixer=draw(feed_forwards(hidden)),
                norm=draw(st.one_of(st.none(), norms(hidden)) if parallel else norms(hidden)),
            ),
        ),
        parallel=parallel,
        residual="stream" if parallel else draw(st.sampled_from(("stream", "normed"))),
    )


@st.composite
def specs(draw: Any) -> ModelSpec:
    """Any tree: what no family has too."""
    hidden, vocabulary = draw(SIZES), draw(SIZES)
    kinds = draw(st.lists(blocks(hidden), min_size=1, max_size=2))
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    return ModelSpec(
        embedding=Embedding(vocab_size=vocabulary, hidden_size=hidden, norm=draw(st.one_of(st.none(), norms(hidden)))),
        blocks=tuple(order),
        final_norm=draw(norms(hidden)),
        head=Head(vocab_size=vocabulary, hidden_size=hidden, tied=draw(st.booleans()), bias=draw(st.booleans())),
        positions=draw(st.sampled_from((None, LearnedPositions(length=1_024, size=hidden)))),
    )
