"""The fixtures of the page's tests; here, so that other tests need neither a browser nor the server's dependencies."""

from support.page_browser import browser, fake, info, page, url, visit  # noqa: F401
