"""Random trees as hypothesis draws them: as families read them, and as none of them would; presets' trees."""

from hypothesis import strategies as st

from gptkit.architectures import architecture_of
from gptkit.architectures.presets import presets
from gptkit.components import (
    ALiBi,
    Attention,
    Block,
    Embedding,
    FeedForward,
    GatedFeedForward,
    Head,
    LayerNorm,
    LearnedPositions,
    ModelSpec,
    RMSNorm,
    Rotary,
    SubLayer,
)


def preset_spec(name: str) -> ModelSpec:
    """The tree of a preset."""
    config = presets()[name].config
    return architecture_of(config).spec(config)


@st.composite
def family_specs(draw: st.DrawFn) -> ModelSpec:
    """A tree as one of the families reads it from a config.json."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    hidden = heads * draw(st.sampled_from([2, 4, 8]))
    layers = draw(st.integers(1, 12))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    common = {"vocab_size": draw(st.integers(1, 300)), "tie_word_embeddings": draw(st.booleans())}
    llama_like = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": draw(st.integers(1, 64)),
        "head_dim": draw(st.sampled_from([2, 4, 8])),
    }
    flag = st.booleans()
    config = draw(
        st.sampled_from(
            [
                {
                    "model_type": "gpt2",
                    "n_embd": hidden,
                    "n_head": heads,
                    "n_layer": layers,
                    "n_positions": 32,
                    "scale_attn_by_inverse_layer_idx": draw(flag),
                },
                {"model_type": "llama", **llama_like, "attention_bias": draw(flag), "mlp_bias": draw(flag)},
                {"model_type": "mistral", **llama_like, "sliding_window": draw(st.sampled_from([None, 8]))},
                {
                    "model_type": "qwen2",
                    **llama_like,
                    "use_sliding_window": draw(flag),
                    "max_window_layers": draw(st.integers(0, 12)),
                },
                {"model_type": "qwen3", **llama_like, "attention_bias": draw(flag)},
                {"model_type": "bloom", "hidden_size": hidden, "n_head": heads, "n_layer": layers},
                {
                    "model_type": "falcon",
                    "hidden_size": hidden,
                    "num_attention_heads": heads,
                    "num_hidden_layers": layers,
                    "multi_query": draw(flag),
                    "parallel_attn": draw(flag),
                    "bias": draw(flag),
                    "alibi": draw(flag),
                },
                {
                    "model_type": "falcon",
                    "hidden_size": hidden,
                    "num_attention_heads": heads,
                    "num_hidden_layers": layers,
                    "num_kv_heads": kv_heads,
                    "new_decoder_architecture": True,
                    "num_ln_in_parallel_attn": draw(st.sampled_from([None, 1, 2])),
                },
            ]
        )
    )
    config |= common
    return architecture_of(config).spec(config)


HIDDEN = 8
norms = st.sampled_from([LayerNorm(size=HIDDEN, eps=1e-5), LayerNorm(size=HIDDEN, eps=1e-5, bias=False)]) | st.just(
    RMSNorm(size=HIDDEN, eps=1e-6)
)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    heads = draw(st.sampled_from([1, 2, 4]))
    head_norm = st.none() | st.just(RMSNorm(size=4, eps=1e-6))
    parallel = draw(st.booleans())
    feed_forward = draw(st.sampled_from([FeedForward, GatedFeedForward]))
    return Block(
        sublayers=(
            SubLayer(
                mixer=Attention(
                    hidden_size=HIDDEN,
                    heads=heads,
                    kv_heads=draw(st.sampled_from([1, heads])),
                    head_dim=4,
                    scale=draw(st.sampled_from([0.5, 1.0])),
                    position=draw(st.sampled_from([None, ALiBi(), Rotary(dim=2, base=1e4)])),
                    window=draw(st.none() | st.integers(1, 9)),
                    q_norm=draw(head_norm),
                    k_norm=draw(head_norm),
                    qkv_bias=draw(st.booleans()),
                    output_bias=draw(st.booleans()),
                ),
                norm=draw(norms),
            ),
            SubLayer(
                mixer=feed_forward(
                    hidden_size=HIDDEN,
                    intermediate_size=draw(st.integers(1, 16)),
                    activation="silu",
                    up_bias=draw(st.booleans()),
                    down_bias=draw(st.booleans()),
                ),
                norm=None if parallel and draw(st.booleans()) else draw(norms),
            ),
        ),
        parallel=parallel,
    )


@st.composite
def mixed_specs(draw: st.DrawFn) -> ModelSpec:
    """A tree that no family has: layers of several kinds, in any order."""
    kinds = draw(st.lists(blocks(), min_size=1, max_size=4))
    return ModelSpec(
        embedding=Embedding(vocab_size=11, hidden_size=HIDDEN, norm=draw(st.none() | norms)),
        positions=draw(st.none() | st.just(LearnedPositions(length=16, size=HIDDEN))),
        blocks=tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))),
        final_norm=draw(norms),
        head=Head(vocab_size=11, hidden_size=HIDDEN, tied=draw(st.booleans()), bias=draw(st.booleans())),
    )
