"""A fake `arpg serve`: the same routes and the same /info, images cut from the thumbnails, failures on demand.

Run it to look at the page without a model: PYTHONPATH=tests python -m support.page_server [PORT]
"""

import base64
import io
import json
import random
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from PIL import Image, ImageDraw, ImageOps, PngImagePlugin

from arpg import Pipeline, VQTokenizer
from arpg.classes import ClassNames
from arpg.config import ControlConfig, ModelConfig, TextConfig, TokenizerConfig
from arpg.serve.schemas import Info, model_info
from arpg.serve.server_config import Limits
from arpg.settings import SamplingDefaults
from support.paths import ROOT
from support.small import small_model

STATIC = ROOT / "src" / "arpg" / "serve" / "static"
NAMES = (ROOT / "tests" / "support" / "page_classes.txt").read_text().splitlines()
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CSP = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
SIDE, GRID, STRIDE = 96, 12, 8
CELL, COLUMNS = 48, 17  # of the sprite


def draw_sprite():
    """A cell for each class: a disc of its own colour on grey."""
    sprite = Image.new("RGB", (COLUMNS * CELL, -(-len(NAMES) // COLUMNS) * CELL), "white")
    for i in range(len(NAMES)):
        row, column = divmod(i, COLUMNS)
        cell = Image.new("RGB", (CELL, CELL), (200, 200, 210))
        colour = f"hsl({37 * i % 360}, 80%, {35 + i % 3 * 12}%)"
        ImageDraw.Draw(cell).ellipse((4 + i % 5, 6, 40, 42 - i % 7), fill=colour)
        sprite.paste(cell, (column * CELL, row * CELL))
    return sprite


SPRITE = draw_sprite()

# Small networks that take classes, prompts, and classes with condition images.
TOKENIZER = TokenizerConfig(
    channels=32, multipliers=(1, 1, 1, 1), res_blocks=1, z_channels=32, codebook_size=64, codebook_dim=4
)
CLASSES = ModelConfig(
    width=32, num_heads=2, pass1_layers=1, pass2_layers=1, vocab_size=64, num_classes=len(NAMES), grid=(GRID, GRID)
)
MODELS = {
    "fruits": CLASSES,
    "fruits-text": replace(CLASSES, num_classes=0, text=TextConfig("minilm", width=384, max_tokens=32)),
    "fruits-control": replace(CLASSES, control=ControlConfig(patch=STRIDE, width=16, num_heads=2, layers=1)),
}
ABOUT = {False: "Fruits on white, at 96 x 96 pixels.", True: "Objects such as a banana, a penguin or a rocket."}
EXAMPLES = {
    False: ("Banana", "Strawberry", "daisy", "Pineapple", "sunflowers", "Kiwi"),
    True: ("two bananas above a lemon", "a strawberry to the left of a green apple", "a rocket above a house"),
}

DEFAULTS = SamplingDefaults(steps=24, guidance_by_steps=((12, 4.0), (24, 3.0)))  # two entries, to interpolate between


def info_of(name):
    """The /info of the real server for one of `MODELS`; its edges can be extracted, but no depth."""
    config = MODELS[name]
    text = config.text is not None
    info = model_info(name, config, TOKENIZER, DEFAULTS, Limits(), about=ABOUT[text], examples=EXAMPLES[text])
    if info["control"]:
        info["control"]["extracts"] = ["canny"]
    return json.loads(Info(**info).model_dump_json())


def fruits_pipeline():
    """A pipeline with random weights for "fruits"."""
    return Pipeline(
        small_model(CLASSES), VQTokenizer(TOKENIZER).eval(), classes=ClassNames(tuple(NAMES)), sampling=DEFAULTS
    )


def entry_of(info):
    """The entry of a model in the list of all."""
    takes = {"class": "classes", "text": "prompts"}[info["takes"]]
    return {
        "name": info["model"],
        "takes": takes,
        "control": bool(info["control"]),
        "default": info["model"] == "fruits",
    }


INFO = info_of("fruits")


class Fake:
    """How the fake server behaves: the time of a step, its failures; and the requests it got."""

    def __init__(self):
        self.pause = 0.01
        self.key = None
        self.info = INFO
        self.models = {}  # the /info of each model by its name, where there are several
        self.failures = []  # (status, error, headers), each used once, before any job
        self.loaded = threading.Event()  # /info answers once it is set
        self.loaded.set()
        self.late = False  # errors come as an event, after the stream has begun
        self.break_after = None  # a stream breaks off after this many steps
        self.requests = []
        self.cancelled = threading.Event()

    def start(self, port=0):
        fake = self
        handler = type("Bound", (Handler,), {"fake": fake})
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.loaded.set()
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    fake: Fake
    protocol_version = "HTTP/1.0"  # one connection for each request, so that a stopped server is really gone

    def log_message(self, *args):
        pass

    def send(self, status, body, kind="application/json", headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def allowed(self):
        if self.fake.key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
            return True
        error = {"message": "This server needs a key.", "type": "authentication_error", "param": None, "code": None}
        self.send(401, {"error": error})
        return False

    def do_GET(self):
        url = urlsplit(self.path)
        path, name = url.path, dict(parse_qsl(url.query)).get("model")
        if path in ("/healthz", "/readyz"):
            return self.send(200, {"status": "ok"})
        file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
        if (path == "/" or path.startswith("/static/")) and file.is_file():
            return self.send(200, file.read_bytes(), TYPES[file.suffix], [("Cache-Control", "no-store")])
        if path.startswith("/v1/") and not self.allowed():
            return None
        if path == "/v1/arpg/info":
            self.fake.loaded.wait()
            models = self.fake.models
            if name is not None and name not in models:
                error = {"message": f"model {name!r} is not served here", "type": "invalid_request_error"}
                return self.send(404, {"error": error})
            info = models[name] if name else next(iter(models.values()), self.fake.info)
            return self.send(200, {**info, "models": [entry_of(each) for each in models.values()]})
        if path == "/v1/arpg/classes":
            thumbnails = {"url": "/v1/arpg/thumbnails.webp", "size": CELL, "columns": COLUMNS}
            classes = [{"id": i, "name": name} for i, name in enumerate(NAMES)]
            return self.send(200, {"classes": classes, "thumbnails": thumbnails})
        if path == "/v1/arpg/thumbnails.webp":
            return self.send(200, sprite_file(), "image/webp")
        return self.send(404, {"error": {"message": f"There is no {path}.", "type": "invalid_request_error"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        task = self.path.rsplit("/", 1)[-1]
        if not self.allowed():
            return
        self.fake.requests.append((task, body))
        if self.fake.failures:
            status, error, headers = self.fake.failures.pop(0)
            return self.send(status, {"error": error}, headers=headers)
        if task == "condition":  # what is bright
            with Image.open(io.BytesIO(base64.b64decode(body["image"]))) as image:
                made = image.convert("L").resize(body["size"]).point(lambda v: 255 * (v > 127))
            size = dict(zip(("width", "height"), body["size"], strict=True))
            return self.send(200, {"png": png(made), "kind": body["kind"], **size})
        if task == "upscale":  # with colours that show where it came from
            with Image.open(io.BytesIO(base64.b64decode(body["image"]))) as image:
                made = ImageOps.invert(image.convert("RGB")).resize((4 * image.width, 4 * image.height))
            return self.send(200, {"png": png(made), "width": made.width, "height": made.height})
        named = body.get("class")
        if named is not None and named not in NAMES:
            near = [name for name in NAMES if name[:3].lower() == str(named)[:3].lower()][:4]
            message = f"class {named!r} is unknown; nearest: {', '.join(near)}"
            error = {"message": message, "type": "invalid_request_error", "param": "class", "code": "unknown_class"}
            if not self.fake.late:
                return self.send(400, {"error": {**error, "nearest": near}})
            event = f"event: error\ndata: {json.dumps({'error': {**error, 'nearest': near}})}\n\n"
            return self.send(200, event.encode(), "text/event-stream")
        if not body.get("stream"):
            return self.send(200, list(self.job(task, body))[-1][1])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            for count, (event, data) in enumerate(self.job(task, body)):
                if self.fake.break_after is not None and count > self.fake.break_after:
                    return None
                self.wfile.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())
                self.wfile.flush()
                time.sleep(self.fake.pause)
        except (BrokenPipeError, ConnectionResetError):
            self.fake.cancelled.set()
        return None

    def job(self, task, body):
        """The events of a job: tokens in the requested order, with a preview of each step."""
        began = time.perf_counter()
        yield "queued", {"id": "req_1", "position": 1}
        num, seed = body.get("num", 1), body.get("seed", 0)
        steps = body.get("steps") or 24
        finished, todo = zip(*[compose(task, body, seed + i) for i in range(num)], strict=True)
        columns, rows = (-(-side // STRIDE) for side in finished[0].size)
        orders = []
        for i in range(num):
            order = sorted(todo[i])
            if body.get("order", "random") == "random":
                random.Random(seed + i).shuffle(order)
            orders.append(order)
        steps = min(steps, max(1, len(orders[0])))
        for step in range(steps):
            maps, previews = [], []
            for image, order in zip(finished, orders, strict=True):
                decoded = [-2] * (rows * columns)
                preview = image.copy()
                for place, position in enumerate(order):
                    at = int(steps * (place / len(order)) ** 0.6)
                    decoded[position] = at if at <= step else -1
                    if at > step:
                        row, column = divmod(position, columns)
                        box = (column * STRIDE, row * STRIDE, (column + 1) * STRIDE, (row + 1) * STRIDE)
                        preview.paste((224, 224, 224), box)
                maps.append(decoded)
                previews.append(png(preview))
            reported = steps if body.get("decode", "steps") == "steps" else None
            event = {"step": step + 1, "steps": reported, "window": 0, "windows": 1}
            yield "step", {**event, "previews": previews, "grid": [rows, columns], "decoded_at": maps}
        given = {name: body[name] for name in INFO["defaults"] if name in body}
        settings = {**INFO["defaults"], "guidance": DEFAULTS.guidance_for(body.get("steps") or 24), **given}
        images = []
        for i, image in enumerate(finished):
            given_label = {name: body[name] for name in ("class", "prompt", "negative") if name in body}
            text = json.dumps(
                {"model": body.get("model", "fruits"), "task": task, **given_label, "seed": seed + i, **settings}
            )
            images.append({"png": png(image, text), "seed": seed + i, "width": image.width, "height": image.height})
        seconds = time.perf_counter() - began
        yield "done", {"id": "req_1", "created": 0, "seconds": seconds, "settings": settings, "images": images}


def compose(task, body, seed):
    """The finished image, and the raster positions of its new tokens."""
    named = body.get("class")
    label = NAMES.index(named) if named in NAMES else random.Random(seed).randrange(len(NAMES))
    made = thumbnail(label, seed)
    if task == "generate":
        return made, range(GRID * GRID)
    if task == "expand":
        image = made.resize(body["size"])
        return image, range(-(-image.width // STRIDE) * -(-image.height // STRIDE))
    given = Image.open(io.BytesIO(base64.b64decode(body["image"]))).convert("RGB")
    if task == "outpaint":
        left, top = body.get("left", 0), body.get("top", 0)
        size = (given.width + left + body.get("right", 0), given.height + top + body.get("bottom", 0))
        image, mask = made.resize(size), Image.new("L", size, 255)
        image.paste(given, (left, top))
        mask.paste(0, (left, top, left + given.width, top + given.height))
    else:
        if task == "edit":
            mask = Image.new("L", given.size)
            mask.paste(255, tuple(body["box"]))
        else:
            mask = Image.open(io.BytesIO(base64.b64decode(body["mask"]))).convert("L")
        image = given.copy()
        image.paste(made.resize(given.size), (0, 0), mask)
    columns, rows = (-(-side // STRIDE) for side in image.size)
    patches = (
        (r, c, (c * STRIDE, r * STRIDE, (c + 1) * STRIDE, (r + 1) * STRIDE))
        for r in range(rows)
        for c in range(columns)
    )
    return image, [r * columns + c for r, c, box in patches if mask.crop(box).getextrema()[1] >= 128]


def thumbnail(label, seed):
    return cell(label).resize((SIDE, SIDE), Image.Resampling.BICUBIC).rotate(seed % 4 * 90)


def cell(label):
    """The sprite's cell of a class."""
    row, column = divmod(label, COLUMNS)
    return SPRITE.crop((column * CELL, row * CELL, column * CELL + CELL, row * CELL + CELL))


def sprite_file():
    buffer = io.BytesIO()
    SPRITE.save(buffer, "webp", quality=90)
    return buffer.getvalue()


def png(image, text=""):
    info = PngImagePlugin.PngInfo()
    if text:
        info.add_text("arpg", text)
    buffer = io.BytesIO()
    image.save(buffer, "png", pnginfo=info)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    served = Fake()
    served.pause = 0.06
    served.models = {name: info_of(name) for name in MODELS}
    sys.stderr.write(served.start(int(sys.argv[1]) if len(sys.argv) > 1 else 8000) + "\n")
    threading.Event().wait()
