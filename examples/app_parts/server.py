"""The server of the page: this machine alone, no other host; see ``app.close_environment`` too."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app_parts.page import STYLE, THEME, make_page
from app_parts.session import Desk

ADDRESS = "127.0.0.1"
# What a browser on this machine calls it. By another name only a page of another site comes here,
# by DNS rebinding.
NAMES = (ADDRESS, "localhost")
# The browser refuses whatever is of another host, even if a document brought it into the page.
# Gradio compiles its templates in the page.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "form-action 'self'",
        "base-uri 'self'",
        "frame-ancestors 'none'",
    )
)


class PolicyHeaders:
    """Adds ``POLICY`` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {
                    b"content-security-policy": POLICY.encode(),
                    b"referrer-policy": b"no-referrer",
                    b"x-content-type-options": b"nosniff",
                }
                kept = [one for one in message["headers"] if one[0].lower() not in headers]
                message = {**message, "headers": [*kept, *headers.items()]}
            await send(message)

        await self.app(scope, receive, with_policy)


class OwnPages:
    """Refuses what a page of another site asks for: its ``Origin`` is none of ``NAMES``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None or urlsplit(origin).hostname in NAMES:
            await self.app(scope, receive, send)
        else:
            refusal = PlainTextResponse("asked by a page of another site", status_code=403)
            await refusal(scope, receive, send)


def serve(desk: Desk, port: int | None) -> None:
    """Serve the page until Ctrl-C, at ``port`` or the first free one from 7860 on.

    Raises:
        OSError: the port is taken.
    """
    page = make_page(desk)
    page.queue(max_size=16)
    _, url, _ = page.launch(
        server_name=ADDRESS,
        server_port=port,
        share=False,
        quiet=True,
        inbrowser=False,
        prevent_thread_lock=True,
        # What is a little too large is refused in our words, which name the remedy.
        max_file_size=4 * desk.limits.upload,
        theme=THEME,
        css_paths=STYLE,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        strict_cors=True,
        state_session_capacity=8,
        app_kwargs={
            "middleware": [
                Middleware(PolicyHeaders),
                Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False),
                Middleware(OwnPages),
            ]
        },
    )
    print(f"open {url} in a browser on this machine; Ctrl-C ends it", flush=True)
    page.block_thread()
