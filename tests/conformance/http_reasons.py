"""Why a test of another project does not pass here; of those that fit, the first holds.

Each entry is a glob of the test's name, "failed" or "not applicable", and the reason.
"""

from __future__ import annotations

_FAILED, _OTHER = "failed", "not applicable"

_OWN_COMPLETION = "the test uses llama.cpp's own /completion"
_NULL_FIRST = "asserts llama.cpp's content: null in a stream's first event; OpenAI's is empty text, as here"
_SHORT = "the served model ends this answer before the tokens that the test counts on"
_COUNTS = "asserts how many tokens stories260K's tokenizer and template make of the prompt"

REASONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "vllm": (
        ("*zephyr-lora*", _OTHER, "LoRA adapters are not served"),
        (
            "*test_completion.py::test_single_completion*",
            _FAILED,
            "asserts vLLM's prompt_logprobs: null in each choice; all before that holds",
        ),
        (
            "*test_completion_truncation_side*",
            _FAILED,
            "vLLM's truncate_prompt_tokens is refused by name: prompts are never cut",
        ),
        (
            "*test_completion.py::test_logprob_token_ids*",
            _FAILED,
            "vLLM's allowed_token_ids and logprob_token_ids are not offered; refused by name",
        ),
        (
            "*prompt_logprobs*",
            _FAILED,
            "vLLM's prompt_logprobs are not offered; completions give them with echo and logprobs",
        ),
        (
            "*test_completion.py::test_completion_streaming*",
            _OTHER,
            _SHORT,
        ),
        (
            "*test_batch_completions*",
            _FAILED,
            "vLLM's beam search is not offered; refused by name. All before that holds",
        ),
        ("*test_empty_prompt", _OTHER, "asserts vLLM's words; the answer is a 400 that names prompt"),
        (
            "*test_out_of_vocab_token_ids",
            _OTHER,
            "asserts vLLM's words; the answer is a 400 that names the token id",
        ),
    ),
    "llama-cpp": (
        ("*::test_chat_completion[[]*", _OTHER, _COUNTS),
        ("*::test_chat_completion_cached_tokens", _OTHER, _COUNTS),
        ("*::test_chat_completion_stream[[]*", _OTHER, _NULL_FIRST),
        ("*::test_chat_completion_with_timings_per_token", _OTHER, _NULL_FIRST),
        ("*::test_logprobs_stream", _OTHER, _NULL_FIRST),
        ("*::test_chat_completion_with_openai_library", _OTHER, _SHORT),
        ("*::test_chat_completions_multiple_choices", _OTHER, _SHORT),
        ("*::test_return_progress*", _OTHER, "llama.cpp's own return_progress"),
        ("*::test_verbose_debug", _OTHER, "llama.cpp's own verbose"),
        (
            "*::test_context_size_exceeded*",
            _OTHER,
            "asserts llama.cpp's error type; the answer is OpenAI's: 400 with code context_length_exceeded",
        ),
        (
            "*::test_invalid_chat_completion_req[[]messages7[]]",
            _OTHER,
            "llama.cpp continues an assistant's last message, and so refuses two; here that is asked for "
            "with continue_final_message",
        ),
        (
            "*::test_completion_with_response_format[[]response_format1-*",
            _FAILED,
            "a list under items (JSON schema before 2020) is refused; prefixItems is its name now",
        ),
        ("*::test_completion_parallel_slots*", _OTHER, _OWN_COMPLETION),
        ("*::test_completion_unified*", _OTHER, _OWN_COMPLETION),
    ),
}
