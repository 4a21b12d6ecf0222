"""Style: the page's style sheet, for light and dark, for a screen and a phone."""

_LIGHT = """
--paper:#fff;--panel:#f6f7f9;--ink:#1c2430;--soft:#566072;--line:#d8dde5;--accent:#0b7a5c;
--bar:#97a1b2;--over:#c2410c;--mark:#b4530a;
--c0:#0b7a5c;--c1:#2f6fde;--c2:#b7791f;--c3:#9a3fb5;--c4:#cf3d5b;--c5:#4c8f1f;--c6:#3a8fa3;--c7:#7a6a58;
"""
_DARK = """
--paper:#12161c;--panel:#1b2129;--ink:#e7ebf1;--soft:#a3adbc;--line:#323b47;--accent:#3ccf9f;
--bar:#6f7b8d;--over:#fb923c;--mark:#f2a65a;
--c0:#3ccf9f;--c1:#74a5ff;--c2:#e8b04b;--c3:#cf8be6;--c4:#ff7d98;--c5:#97d05f;--c6:#67c7dd;--c7:#b9a690;
"""
COLOURS = 8

_COLOURED = "".join(
    f"rect.c{i},circle.c{i}{{fill:var(--c{i})}}polyline.c{i}{{stroke:var(--c{i})}}"
    f".swatch.c{i}{{background:var(--c{i})}}"
    for i in range(COLOURS)
)

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{_DARK}}}}}"
    f":root[data-theme=light]{{color-scheme:light}}:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}"
    + _COLOURED
    + """
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 20px 60px;max-width:1080px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:26px;line-height:1.25;margin:8px 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:44px 0 8px}
h3{font-size:14px;font-weight:600;margin:0 0 6px}
p{margin:8px 0;max-width:75ch}
.soft,.about{color:var(--soft)}
.about{font-size:13px}
.findings{padding-left:20px;font-size:16px}
.findings li{margin:4px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px;
margin:14px 0}
.tile{background:var(--panel);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:17px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{font-size:13px;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:18px;
margin:18px 0}
figure{margin:0;padding:14px;background:var(--panel);border-radius:8px;min-width:0}
svg{display:block;width:100%;height:auto;max-width:520px;margin:0 auto}
svg text{fill:var(--ink);font-size:12.5px}
svg .tick,svg .axis,svg .note{fill:var(--soft)}
svg .tick,svg .note{font-size:11.5px}
svg .grid{stroke:var(--line);stroke-width:1;fill:none}
svg .mark{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:3 3;fill:none}
svg .line{fill:none;stroke-width:2}
rect.bar{fill:var(--bar)}rect.ours{fill:var(--accent)}rect.over{fill:var(--over)}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:7px 8px;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child{text-align:left;padding-left:0}
td:not(:first-child){white-space:nowrap}
th{font-weight:600;vertical-align:bottom}
th small,td small{display:block;font-weight:400;font-size:12px;color:var(--soft)}
tr.ours td:first-child{font-weight:600}
.no{color:var(--over)}
.swatch{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 14px;font-size:13px;color:var(--soft)}
dt{color:var(--ink)}dd{margin:0;overflow-wrap:anywhere}
code{font:12.5px ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
@media (max-width:820px){
body{padding:16px 12px 40px}
figure{padding:12px 6px}
figure h3{padding:0 6px}
table,tbody,tr,td{display:block}
thead{display:none}
tr{padding:10px 0;border-bottom:1px solid var(--line)}
td,td:first-child{display:flex;justify-content:space-between;gap:16px;padding:2px 0;border:0;
text-align:right}
td:first-child{display:block;text-align:left;font-weight:600;padding-bottom:4px}
td::before{content:attr(data-label);color:var(--soft);text-align:left;white-space:normal}
td:first-child::before{content:none}
dl{grid-template-columns:1fr}dt{margin-top:6px}
}
@media print{figure,tr{break-inside:avoid}}
"""
)
