"""Messages between the API process and the engine process: msgspec structs over a local ZeroMQ socket.

The API side tokenises, validates, detokenises and matches stop strings; the engine sees token ids only.
Everything here is validated before it is sent, so the engine may treat a violation as a bug.
"""

from __future__ import annotations

from typing import Literal

import msgspec

BUILD_FACTS = ("python", "torch", "threads", "cpu_isa", "cuda_kernels", "cuda_reason", "dispatch_table")
"""What `EngineInfo.build` says of the engine process and its compiled kernels."""

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one sequence. Stop strings are the API side's business.

    Attributes:
        max_tokens: upper bound on generated tokens, >= 1 (0 only together with `prompt_logprobs`).
        min_tokens: end-of-sequence and stop tokens are masked until this many were generated.
        temperature: 0.0 means greedy.
        top_p, top_k, min_p: filters, applied after temperature; 1.0, 0 and 0.0 switch them off.
        seed: makes the sequence's draws reproducible whatever else is in the batch; None draws from
            the engine's own generator.
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens in prompt or output.
        presence_penalty, frequency_penalty: subtracted for tokens in the output so far.
        logit_bias: token id -> added to the logit.
        logprobs: None for no log probabilities, else how many alternatives beside the chosen token's.
        prompt_logprobs: the same for the tokens of the prompt.
        stop_token_ids: further tokens that end the sequence.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        grammar: key of an AddGrammar sent before; the tokens must spell a text that it matches.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token and of the likeliest alternatives, before temperature and filters.

    `top` is sorted by falling log probability. Every value is finite or -inf; the API side maps -inf.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


# API -> engine


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """Start one sequence. `request_id` is unique among open requests; the prompt is non-empty and in
    vocabulary."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """Drop these sequences and free their blocks before the step after next. Unknown ids are ignored."""

    request_ids: list[str]


class SetVocabulary(msgspec.Struct, tag="vocabulary", frozen=True):
    """What the grammar library needs to know of the tokenizer; sent once, before the first AddGrammar."""

    data: str


class AddGrammar(msgspec.Struct, tag="add_grammar", frozen=True):
    """Keep a compiled grammar under `key` for the requests that follow, until DropGrammar."""

    key: int
    data: str


class DropGrammar(msgspec.Struct, tag="drop_grammar", frozen=True):
    """No later request names this grammar; running sequences go on with it."""

    key: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop at once; the API side has drained what it wanted drained."""


ToEngine = AddRequest | AbortRequest | SetVocabulary | AddGrammar | DropGrammar | Shutdown


# engine -> API


class LinearLayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One linear layer as it lies in memory: for `lacunar inspect`, /metrics and the log."""

    name: str
    N: int
    K: int
    dtype: str
    format: str
    sparsity: float
    dense_bytes: int
    stored_bytes: int
    backends: dict[str, str] = {}
    reason: str = ""


class EngineInfo(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """Sent once when the model is loaded and the engine takes requests; `build` has the keys BUILD_FACTS."""

    architecture: str
    implementation: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_kv_blocks: int
    kv_block_size: int
    max_num_sequences: int
    dense_bytes: int
    stored_bytes: int
    load_seconds: float
    build: dict[str, str] = {}
    layers: list[LinearLayerInfo] = []


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step produced for one sequence.

    Attributes:
        token_ids: new tokens; the stop token that ended the sequence is included.
        stop_token_id: the token that ended the sequence when `finish_reason` is "stop", else None.
        logprobs: one entry per new token when asked for.
        prompt_logprobs: on the first output when asked for; entry 0 (no context) is None.
        error: why, when `finish_reason` is "error"; safe to show to a client.
        cached_tokens: prompt tokens whose KV was reused; on the first output.
        queue_seconds, prefill_seconds: on the first output.
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    cached_tokens: int = 0
    queue_seconds: float | None = None
    prefill_seconds: float | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's state; also its heartbeat (sent with every step's outputs, and each second when idle).

    Counters are cumulative since start; `step_seconds` lists the steps since the last message as
    (phase, seconds, tokens in the step) with phase "prefill", "decode" or "mixed". The prefix cache's queries
    and hits count tokens: of sequences that looked for a known beginning, and of what they found.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    step_seconds: list[tuple[str, float, int]] = []
    linear_calls_total: dict[str, int] = {}
    """Calls by "backend|m_bucket", e.g. "bitmap_avx512|1"."""
    resident_bytes: int = 0
    gpu_allocated_bytes: int = 0
    gpu_reserved_bytes: int = 0
    gpu_peak_bytes: int = 0
    """What torch's allocator says of the engine's GPU; zero on a CPU."""


class StepOutputs(msgspec.Struct, tag="step", frozen=True, kw_only=True):
    """All sequences' outputs of one step, and the state after it.

    `sent_seconds` is this machine's monotonic clock, which both processes read.
    """

    outputs: list[RequestOutput] = []
    stats: EngineStats = EngineStats()
    sent_seconds: float = 0.0


class LoadProgress(msgspec.Struct, tag="progress", frozen=True):
    """A line of the start-up's progress: what is being done, how far (0..1)."""

    stage: str
    fraction: float


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot start or go on. `kind` is the error class's name, `message` is for a person."""

    kind: str
    message: str


FromEngine = EngineInfo | StepOutputs | LoadProgress | EngineFailed
