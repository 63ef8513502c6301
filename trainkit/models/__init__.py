"""Models: plain `nn.Module`s without buffers; their values are functions of a seed and of names.

`decoder` is the dense Llama and Qwen3 family, `sizes` names its public and small sizes, `generate`
draws text.
"""
