"""A harness for Verifiers' own side of benchmarks/rollouts.py: the shortest loop over its interception
server, without the program and the sandbox that its default harnesses start.
"""

import asyncio

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.types import UserMessage

# Making one takes a tenth of a second, so a loop has one.
_clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}


class ChatInProcess(vf.Harness[vf.HarnessConfig]):
    """One model call for each segment of the conversation."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Run one segment."""
        _, prompt = self.resolve_prompt(data)
        messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        loop = asyncio.get_running_loop()
        if loop not in _clients:
            _clients[loop] = httpx.AsyncClient(
                timeout=None, verify=False, limits=httpx.Limits(max_connections=None)
            )
        response = await _clients[loop].post(
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": [message_to_wire(one) for one in messages]},
        )
        return vf.ProgramResult(int(response.status_code != 200), "", response.text)


__all__ = ["ChatInProcess"]
