"""Style: the page's colours, light and dark, and its style sheet for a screen and a phone."""

# Name, light colour, dark colour. Charts are drawn in the light ones; on the page each becomes the
# variable of its name.
COLOURS = {
    "paper": ("#ffffff", "#12161c"),
    "panel": ("#f6f7f9", "#1b2129"),
    "ink": ("#1c2430", "#e7ebf1"),
    "soft": ("#566072", "#a3adbc"),
    "line": ("#d8dde5", "#323b47"),
    "bar": ("#97a1b2", "#6f7b8d"),
    "over": ("#c2410c", "#fb923c"),
    "c0": ("#0b7a5c", "#3ccf9f"),
    "c1": ("#2f6fde", "#74a5ff"),
    "c2": ("#b7791f", "#e8b04b"),
    "c3": ("#9a3fb5", "#cf8be6"),
    "c4": ("#cf3d5b", "#ff7d98"),
    "c5": ("#4c8f1f", "#97d05f"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
DARK = {name: dark for name, (_, dark) in COLOURS.items()}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


STYLE = (
    f"""
:root{{color-scheme:light dark;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}
"""
    + """
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 20px 60px;max-width:1080px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:26px;line-height:1.25;margin:8px 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:36px 0 8px}
h3{font-size:14px;font-weight:600;margin:0 0 6px}
p{margin:8px 0;max-width:75ch;overflow-wrap:anywhere}
.soft,dl{color:var(--soft);font-size:13px}
.findings{padding-left:20px;font-size:16px}
.findings li{margin:4px 0;overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:18px;
margin:14px 0;align-items:start}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:8px;margin:14px 0}
.tile,figure{margin:0;padding:10px 12px;background:var(--panel);border-radius:8px;min-width:0}
.tile b{display:block;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{font-size:13px;color:var(--soft)}
svg{display:block;width:100%;height:auto;max-width:520px;margin:0 auto}
.scroll{overflow-x:auto;margin:12px 0}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;min-width:100%}
th,td{text-align:right;padding:6px 8px;border-bottom:1px solid var(--line);vertical-align:top;
white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0;position:sticky;left:0;
background:var(--paper);white-space:normal;min-width:130px}
th{font-weight:600;vertical-align:bottom}
small{display:block;font-weight:400;font-size:12px;color:var(--soft)}
.ours td:first-child{font-weight:600}
summary{cursor:pointer;margin:10px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 14px}
dt{color:var(--ink)}dd{margin:0;overflow-wrap:anywhere}
code{font:12.5px ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
@media (max-width:600px){body{padding:12px 12px 40px}figure{padding:10px 4px}h2{margin-top:26px}}
@media print{figure,tr{break-inside:avoid}}
"""
)
