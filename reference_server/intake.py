"""From headers and body to a request that the engine can take, or to an error that says why not."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_server.faults import parse_fault
from reference_server.front_end import FrontEnd
from reference_server.openai_api import ApiError, CompletionRequest, parse_body
from sloscope import contract
from sloscope.errors import ConfigError, ContractError, ModelFileError

LONG_PROMPT_CHARS = 4096  # from here on encoding takes milliseconds: not on the loop


class ContextError(ApiError):
    """Admission's refusal of what no waiting can mend. It is decided here and not in the scheduler, which would have
    to read a prompt of any length between two steps."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")


@dataclass(slots=True)
class Asked:
    """Everything about a request that was found good."""

    completion: CompletionRequest
    prompt: list[int]
    max_tokens: int
    stop_after: int | None
    fault: str
    request_class: str
    ttft_limit_ns: int | None
    itl_max_limit_ns: int | None


class Intake:
    """`known` fills up for the begin record as far as the request was understood."""

    def __init__(self, front_end: FrontEnd, headers: Mapping[str, str], chat: bool) -> None:
        self._front = front_end
        self._headers = headers
        self._chat = chat
        self.known: dict[str, Any] = {}
        self.min_tokens = 1

    async def understand(self, body: bytes) -> Asked:
        front, known = self._front, self.known
        self._promised()
        completion = parse_body(body, self._chat)
        known |= {
            "model": completion.model[:256],
            "streaming": completion.stream,
            "n_choices": 1,
            "max_tokens": completion.max_tokens,
        }
        if not front.healthy:
            raise ApiError(503, "the server is stopping", kind="server_error", code="stopping")
        if completion.model != front.model:
            raise ApiError(
                404, f"model: {completion.model[:60]!r} is not served here; accepted: {front.model}",
                param="model", code="model_not_found",
            )  # fmt: skip
        stop_after = self._stop_after()
        fault = self._fault()
        known["stop_after"] = stop_after
        prompt = await self._encode(completion)
        known["prompt_tokens"] = len(prompt)
        room = front.max_context - len(prompt)
        # What a request did not ask for must not get it refused.
        likely = min(front.default_max_tokens, room, front.kv_tokens - len(prompt))
        max_tokens = completion.max_tokens or max(likely, 1)
        if max_tokens > room:
            raise ContextError(
                f"max_tokens: prompt {len(prompt)} + max_tokens {max_tokens} = {len(prompt) + max_tokens} tokens; "
                f"accepted: at most {front.max_context} together",
                param="max_tokens",
            )
        known["max_tokens"] = max_tokens
        limits = known.get("limits", {})
        return Asked(
            completion,
            prompt,
            max_tokens,
            stop_after,
            fault,
            request_class=known["class_"],
            ttft_limit_ns=limits.get("ttft_ns"),
            itl_max_limit_ns=limits.get("itl_max_ns"),
        )

    def _promised(self) -> None:
        """Class and limits. A class that the contract does not know is refused; without a contract none is."""
        front = self._front
        name = self._headers.get(contract.CLASS_HEADER) or front.contract.default_class
        named = name in front.contract.classes or not front.has_contract
        self.known["class_"] = name[:256] if named else contract.UNKNOWN_CLASS
        self.known["contract_hash"] = front.contract_hash
        if not named:
            accepted = ", ".join(front.contract.classes)
            raise ApiError(
                400, f"{contract.CLASS_HEADER}: {name[:60]!r} is unknown; accepted: {accepted}",
                param=contract.CLASS_HEADER,
            )  # fmt: skip
        try:
            resolved = contract.resolve(front.contract, self._headers)
        except ContractError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None
        self.min_tokens = resolved.limits.min_tokens
        if front.has_contract or resolved.own:
            self.known["limits"] = resolved.limits.as_record()
        if resolved.own:
            self.known["own_limits"] = dict(resolved.own)

    def _stop_after(self) -> int | None:
        text = self._headers.get("x-sloscope-stop-after")
        if text is None:
            return None
        # Python refuses to read numbers of thousands of digits.
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= 1_000_000):
            raise ApiError(
                400, f"x-sloscope-stop-after: {text[:40]!r} is not accepted; accepted: a number of tokens from 1",
                param="x-sloscope-stop-after",
            )  # fmt: skip
        return int(text)

    def _fault(self) -> str:
        text = self._headers.get("x-sloscope-fault", "")
        if not text:
            return ""
        if not self._front.allow_faults:
            raise ApiError(
                400, "x-sloscope-fault: faults are off; accepted: only with sloscope serve --allow-faults",
                param="x-sloscope-fault",
            )  # fmt: skip
        try:
            parse_fault(text)
        except ConfigError as error:
            raise ApiError(400, str(error), param="x-sloscope-fault") from None
        return text

    async def _encode(self, completion: CompletionRequest) -> list[int]:
        front, tokenizer = self._front, self._front.tokenizer
        if isinstance(completion.prompt, list):
            vocabulary = len(tokenizer.spec.tokens)
            if not all(0 <= token_id < vocabulary for token_id in completion.prompt):
                raise ApiError(
                    400, f"prompt: a token id is out of range; accepted: 0 to {vocabulary - 1}", param="prompt"
                )
            return completion.prompt
        try:
            text = completion.prompt or tokenizer.render_chat(completion.messages or [])
        except ModelFileError as error:
            raise ApiError(400, str(error), param="messages") from None
        most = front.max_context * tokenizer.longest_token
        if len(text) > most:  # said without encoding, which would take as long as the prompt is
            raise ContextError(
                f"prompt: {len(text)} characters, more than {front.max_context} tokens; accepted: at most that",
                param="prompt",
            )
        if len(text) < LONG_PROMPT_CHARS:
            ids = tokenizer.encode(text)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(None, tokenizer.encode, text)
        if not ids:
            raise ApiError(400, "prompt: no tokens; accepted: at least one", param="prompt")
        return ids
