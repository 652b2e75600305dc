"""An engine that answers from a script, for tests of what surrounds an engine."""

import asyncio


class ScriptedEngine:
    """Answers its calls in turn; a script entry is a ``meta_info``, or a function of the request that makes one."""

    def __init__(self, *script):
        self.script, self.requests, self.aborts = list(script), [], 0

    async def generate(self, request, read):
        self.requests.append(request)
        meta = self.script.pop(0)
        await asyncio.sleep(0)
        meta = meta(request) if callable(meta) else meta
        return read({"output_ids": [entry[1] for entry in meta["output_token_logprobs"]], "meta_info": meta})

    async def abort(self):
        self.aborts += 1
