"""A real browser, if one is installed: opens a page and says what is wrong with it."""

import json
import re
import shutil
import subprocess
from html import unescape

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--log-level=0",
    "--window-size=1400,900",
    "--virtual-time-budget=3000",
]

# Runs inside the page: finds text that is cut or overlaps, in drawings and elsewhere.
PROBE = """
addEventListener("load", () => {
  const problems = [], name = (e) => e.textContent.trim().slice(0, 40);
  const height = document.body.offsetHeight;  // as it opens
  for (const each of document.querySelectorAll("details")) each.open = true;
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) problems.push(`the page is ${wide} wide`);
  const drawings = document.querySelectorAll("svg");
  for (const svg of drawings) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")];
    const boxes = texts.map((text) => text.getBoundingClientRect());
    boxes.forEach((a, i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 ||
          a.bottom > frame.bottom + 1) problems.push(`cut: ${name(texts[i])}`);
      const size = parseFloat(getComputedStyle(texts[i]).fontSize) * frame.width / 400;
      if (size < 9) problems.push(`too small: ${name(texts[i])}`);
      boxes.slice(i + 1).forEach((b, j) => {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 3)
          problems.push(`overlap: ${name(texts[i])} and ${name(texts[i + 1 + j])}`);
      });
    });
  }
  for (const e of document.querySelectorAll("td, th, h1, h2, p, li, dd, dt"))
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) problems.push(`cut: ${name(e)}`);
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => c / 255)
      .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let contrast = 21;
  for (const e of document.querySelectorAll("text, p, li, td, th, small, dd, dt")) {
    const style = getComputedStyle(e);
    const [a, b] = [light(e.tagName === "text" ? style.fill : style.color), light(behind(e))];
    contrast = Math.min(contrast, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const seen = { width: innerWidth, height, dark, problems, contrast, drawings: drawings.length };
  parent.postMessage(JSON.stringify(seen), "*");
});
"""

# The window of a browser has a least width; a frame has none.
FRAME = """<body><script>
addEventListener("message", (e) => document.body.append(
  Object.assign(document.createElement("pre"), { id: "seen", textContent: e.data })));
</script><iframe src="probed.html" style="border:0;width:{width}px;height:9000px"></iframe>"""


def look(page: str, folder, *, width: int, dark: bool = False) -> dict:
    """What a page in a window of this width shows: problems, console messages, contrast, drawings.

    Args:
        page: its text.
        folder: where to write copies and the browser's profile.
        width: of the window.
        dark: whether the reader prefers dark pages.
    """
    probed = page.replace("</head>", f"<script>{PROBE}</script></head>", 1)
    (folder / "probed.html").write_text(probed)
    frame = folder / "frame.html"
    frame.write_text(FRAME.replace("{width}", str(width)))
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(found.group(1))) | {"console": console}
