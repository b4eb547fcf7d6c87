"""The papers behind components: authors and arXiv number, as they are cited."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper: who wrote it, its number on arXiv, and what it is called."""

    authors: str
    arxiv: str
    title: str

    def __str__(self) -> str:
        return f"{self.authors} {self.arxiv}"


PAPERS = {
    "transformer": Paper("Vaswani et al.", "1706.03762", "Attention Is All You Need"),
    "layernorm": Paper("Ba et al.", "1607.06450", "Layer Normalization"),
    "gelu": Paper("Hendrycks & Gimpel", "1606.08415", "Gaussian Error Linear Units (GELUs)"),
    "tied": Paper("Press & Wolf", "1608.05859", "Using the Output Embedding to Improve Language Models"),
    "rmsnorm": Paper("Zhang & Sennrich", "1910.07467", "Root Mean Square Layer Normalization"),
    "mqa": Paper("Shazeer", "1911.02150", "Fast Transformer Decoding: One Write-Head is All You Need"),
    "scaling": Paper("Kaplan et al.", "2001.08361", "Scaling Laws for Neural Language Models"),
    "pre-norm": Paper("Xiong et al.", "2002.04745", "On Layer Normalization in the Transformer Architecture"),
    "glu": Paper("Shazeer", "2002.05202", "GLU Variants Improve Transformer"),
    "gpt3": Paper("Brown et al.", "2005.14165", "Language Models are Few-Shot Learners"),
    "rope": Paper("Su et al.", "2104.09864", "RoFormer: Enhanced Transformer with Rotary Position Embedding"),
    "alibi": Paper(
        "Press et al.",
        "2108.12409",
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
    ),
    "chinchilla": Paper("Hoffmann et al.", "2203.15556", "Training Compute-Optimal Large Language Models"),
    "palm": Paper("Chowdhery et al.", "2204.02311", "PaLM: Scaling Language Modeling with Pathways"),
    "llama": Paper("Touvron et al.", "2302.13971", "LLaMA: Open and Efficient Foundation Language Models"),
    "gqa": Paper(
        "Ainslie et al.",
        "2305.13245",
        "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
    ),
    "yarn": Paper("Peng et al.", "2309.00071", "YaRN: Efficient Context Window Extension of Large Language Models"),
    "mistral": Paper("Jiang et al.", "2310.06825", "Mistral 7B"),
    "mla": Paper(
        "DeepSeek-AI",
        "2405.04434",
        "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
    ),
    "base": Paper("Men et al.", "2405.14591", "Base of RoPE Bounds Context Length"),
}
