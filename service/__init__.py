"""Lacunar: an OpenAI-compatible server for pruned language models."""

__version__ = "0.1.0"
