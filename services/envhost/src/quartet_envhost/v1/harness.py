"""A chat loop that runs inside the worker: no program, no sandbox, no process per rollout.

Verifiers allows it ("the interception is the contract, not the process"): every model call goes through the
rollout's session, which knows limits, stops and errors; the loop only carries messages and tool calls.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import verifiers.v1 as vf
from pydantic_core import from_json
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ToolsetError
from verifiers.v1.harnesses.utils.mcp import connect_mcp, mcp_content_to_chat_content
from verifiers.v1.types import UserMessage

from quartet_envhost.v1.arguments import read_arguments
from quartet_envhost.v1.interception import HostInterception, local_server
from quartet_envhost.v1.shared import answered

HARNESS_ID: Final = "quartet_in_process"
# Where Verifiers looks for a harness of this id first, once in every rollout; only there it is at hand.
MODULE_NAME: Final = f"verifiers.v1.harnesses.{HARNESS_ID}"
# A model that never stops calling tools would otherwise hold its slot until the deadline.
MAX_MODEL_CALLS: Final = 512
# What ends a rollout before the model does, besides Verifiers' own limits.
PROMPT_TOO_LONG: Final = "prompt_too_long"
TOO_MANY_CALLS: Final = "too_many_model_calls"
CUT_SHORT: Final = frozenset({PROMPT_TOO_LONG, TOO_MANY_CALLS})


class InProcessHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Chat completions with MCP tools until the model answers without a tool call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Run one segment of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            prompt = [UserMessage(content=prompt)]
        messages += [message_to_wire(message) for message in prompt or []]
        server = local_server(endpoint)
        if not mcp_urls:
            return await self._converse(server, ctx, trace, secret, messages, None)
        async with AsyncExitStack() as stack:
            spec = {"mcpServers": {name: self._server_spec(url) for name, url in mcp_urls.items()}}
            try:
                # Of the first ones it takes half a second, in which other rollouts go on.
                await asyncio.to_thread(importlib.import_module, "mcp.client.streamable_http")
                tools = await connect_mcp(spec, stack)
            except ValueError:  # two tools of one name
                raise
            # As for a call: whatever the transport raises, a server did not answer.
            except Exception as error:
                text = f"tool servers {', '.join(mcp_urls)} do not answer: {_said(error)}"
                raise ToolsetError(text) from error
            return await self._converse(server, ctx, trace, secret, messages, tools)

    def _server_spec(self, url: str) -> dict[str, Any]:
        return {"url": url, "timeout": self.config.tool_timeout}

    async def _converse(
        self,
        server: HostInterception,
        ctx: Any,
        trace: Any,
        secret: str,
        messages: list[dict[str, Any]],
        tools: tuple[list[dict[str, Any]], dict[str, tuple[str, str]], dict[str, Any]] | None,
    ) -> vf.ProgramResult:
        offered = [t for t in tools[0] if not self._disabled(t)] if tools else []
        for _ in range(MAX_MODEL_CALLS):
            body = {"model": ctx.model, "messages": messages, **({"tools": offered} if offered else {})}
            status, raw = await server.post(secret, body)
            if status != 200:
                text = raw.decode(errors="replace")
                if "PROMPT_TOO_LONG" in text and trace.num_turns:
                    # The context is used up: the rollout ends here, truncated, and is scored as it stands.
                    trace.stop(PROMPT_TOO_LONG)
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                # A limit, a stop or a failure; the session knows which, and the rollout asks it.
                return vf.ProgramResult(exit_code=1, stdout="", stderr=text)
            message = from_json(raw)["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            calls = message.get("tool_calls")
            if not calls or tools is None:
                break
            for call in calls:
                messages.append(await _run_tool(call, tools))
        else:
            trace.stop(TOO_MANY_CALLS)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _disabled(self, tool: dict[str, Any]) -> bool:
        return tool["function"]["name"] in (self.config.disabled_tools or ())


async def _run_tool(
    call: dict[str, Any], tools: tuple[list[dict[str, Any]], dict[str, tuple[str, str]], dict[str, Any]]
) -> dict[str, Any]:
    """The tool's answer as a message. What the model did wrong is told to the model; it is not a failure."""
    _, dispatch, servers = tools
    name = call["function"]["name"]
    try:
        arguments = read_arguments(call["function"]["arguments"])
    except ValueError as error:
        content: Any = f"error: arguments are not JSON: {error}"
    else:
        if name not in dispatch:
            content = f"error: no tool {name!r}; the tools are {', '.join(dispatch)}"
        elif not isinstance(arguments, dict):
            content = "error: arguments must be a JSON object"
        else:
            try:
                server, raw = dispatch[name]
                content = await servers[server].run(partial(_answer, tool=raw, arguments=arguments))
                answered(server)
            # Whatever its transport raises: the server did not answer. An error that the tool itself
            # answered with is content.
            except Exception as error:
                raise ToolsetError(f"tool {name} did not answer: {_said(error)}") from error
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


async def _answer(client: Any, tool: str, arguments: dict[str, Any]) -> Any:
    """What a tool answers. What nobody can read, an escape that is half a character, is told to the model as
    an error of the tool: called again, it would do and answer the same."""
    # Imported by now; before, workers whose environment has no tools would pay for it.
    from mcp import MCPError  # type: ignore[import-not-found]
    from mcp_types import PARSE_ERROR  # type: ignore[import-not-found]

    try:
        return mcp_content_to_chat_content((await client.call_tool(tool, arguments)).content)
    except MCPError as error:
        if error.code == PARSE_ERROR and "Invalid JSON" in error.message:
            return f"error: the answer of {tool} is no text that can be read"
        raise


def _said(error: Exception) -> str:
    """Of errors that a transport gathered the first."""
    one: BaseException = error
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    return f"{type(one).__name__}: {one}"


__all__ = ["InProcessHarness"]

sys.modules.setdefault(MODULE_NAME, sys.modules[__name__])
