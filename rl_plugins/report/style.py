"""How the page looks, by day and by night, on a screen and on paper."""

STYLE = """
:root { color-scheme: light dark; --text: #1d2129; --pale: #6a7180; --back: #fff; --box: #f5f6f8; --line: #dde0e6;
  --bad: #b3261e; --c0: #2f6fde; --c1: #e07b1a; --c2: #2a9d5c; --c3: #c2403d; --c4: #8259c9; --c5: #14929e;
  --c6: #c44a93; --c7: #8a8f99; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6eb; --pale: #9aa1af; --back: #14161a; --box: #1e2127; --line: #333842; --bad: #ff8a80;
    --c0: #6ea0ff; --c1: #ffa552; --c2: #5fce8f; --c3: #ff7b76; --c4: #b497f0; --c5: #4fc7d3; --c6: #f08ac4;
    --c7: #a6abb6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 82rem; padding: 1.5rem; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 2.2rem 0 .7rem; font-size: 1.2rem; }
p { margin: .3rem 0 .8rem; } .pale, figcaption, th { color: var(--pale); }
.bad { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
.tiles, .charts { display: grid; gap: .8rem; } .tiles { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); }
.tile, figure { margin: 0 0 .2rem; padding: .7rem .9rem; border-radius: .5rem; background: var(--box); }
.tile span { display: block; color: var(--pale); font-size: .85rem; }
.tile b { font-size: 1.1rem; white-space: nowrap; }
figcaption { margin-bottom: .3rem; font-size: .9rem; } svg { display: block; width: 100%; }
svg text { fill: var(--pale); font-size: 11px; font-family: system-ui, sans-serif; }
.value { text-anchor: end; dominant-baseline: middle; } .step { text-anchor: middle; }
.grid { stroke: var(--line); } .line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.band { fill: var(--c); opacity: .2; } .fill { fill: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .82rem; color: var(--pale); }
.legend b { color: var(--text); font-weight: 600; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .3rem;
  background: var(--c); }
table { border-collapse: collapse; font-size: .9rem; } th { text-align: left; font-weight: 500; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.samples { width: 100%; table-layout: fixed; } .samples div, pre { overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: .82rem/1.4 ui-monospace, monospace; } .samples div { max-height: 14rem; }
.samples th:nth-child(2) { width: 14%; }
.better { color: var(--c2); } .worse { color: var(--bad); }
pre { margin: .5rem 0; padding: .8rem; border-radius: .5rem; background: var(--box); }
summary { cursor: pointer; margin: .5rem 0; } code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
@media print { details > * { display: block; } }
"""
