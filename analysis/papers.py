"""The papers that `recommend` cites, with their authors and arXiv numbers."""

from dataclasses import dataclass

from ..display import Record


@dataclass(frozen=True)
class Paper(Record):
    """A paper: its authors, its arXiv number and its title."""

    authors: str
    arxiv: str
    title: str

    def __str__(self) -> str:
        return f"{self.authors} {self.arxiv}"


_LIST = """
transformer|Vaswani et al.|1706.03762|Attention Is All You Need
layernorm|Ba et al.|1607.06450|Layer Normalization
gelu|Hendrycks & Gimpel|1606.08415|Gaussian Error Linear Units (GELUs)
tied|Press & Wolf|1608.05859|Using the Output Embedding to Improve Language Models
rmsnorm|Zhang & Sennrich|1910.07467|Root Mean Square Layer Normalization
mqa|Shazeer|1911.02150|Fast Transformer Decoding: One Write-Head is All You Need
scaling|Kaplan et al.|2001.08361|Scaling Laws for Neural Language Models
pre-norm|Xiong et al.|2002.04745|On Layer Normalization in the Transformer Architecture
glu|Shazeer|2002.05202|GLU Variants Improve Transformer
gpt3|Brown et al.|2005.14165|Language Models are Few-Shot Learners
rope|Su et al.|2104.09864|RoFormer: Enhanced Transformer with Rotary Position Embedding
alibi|Press et al.|2108.12409|Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation
chinchilla|Hoffmann et al.|2203.15556|Training Compute-Optimal Large Language Models
palm|Chowdhery et al.|2204.02311|PaLM: Scaling Language Modeling with Pathways
llama|Touvron et al.|2302.13971|LLaMA: Open and Efficient Foundation Language Models
gqa|Ainslie et al.|2305.13245|GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints
yarn|Peng et al.|2309.00071|YaRN: Efficient Context Window Extension of Large Language Models
mistral|Jiang et al.|2310.06825|Mistral 7B
mla|DeepSeek-AI|2405.04434|DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model
base|Men et al.|2405.14591|Base of RoPE Bounds Context Length
"""
PAPERS = {name: Paper(*cells) for name, *cells in (line.split("|") for line in _LIST.strip().splitlines())}
