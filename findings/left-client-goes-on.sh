#!/usr/bin/env bash
# fastapi 0.165.0 on uvicorn 0.54.0: a handler goes on to its end when its client has left.
#
# Expected: as the handler is a coroutine, it is cancelled at its next await when the connection is
#   closed, so that the work for an answer that nobody reads ends.
# Seen: it runs to its end, awaits and all, and the answer is dropped. CancelledError comes to the
#   generator of a StreamingResponse alone. A server that computes long answers in plain handlers
#   works for clients that timed out, and again for each of their retries, unless it asks
#   request.is_disconnected() itself.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0
"$place/venv/bin/python" - <<'EOF'
import asyncio
import socket
import threading
import time

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

app, steps = FastAPI(), {"plain": [], "stream": []}


async def work(name):
    try:
        for step in range(40):
            await asyncio.sleep(0.05)
            steps[name].append(step)
            yield b"x"
    except (asyncio.CancelledError, GeneratorExit):
        steps[name].append("cancelled")
        raise


@app.post("/plain")
async def plain():
    return len([step async for step in work("plain")])


@app.post("/stream")
async def stream():
    return StreamingResponse(work("stream"))


place = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True).start()
for name, seen in steps.items():
    with socket.create_connection(place.getsockname()) as client:
        client.sendall(f"POST /{name} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        while len(seen) < 5:
            time.sleep(0.01)
    time.sleep(4)
    print(f"{name}: the client left at step 5, the last step was {seen[-2:]}")
assert steps["plain"][-1] == 39 and steps["stream"][-1] == "cancelled"
EOF
