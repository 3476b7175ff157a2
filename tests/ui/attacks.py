"""Markdown that attacks the page: scripts, frames, links and images in every notation."""

from __future__ import annotations

from itertools import product

ACTIONS = ("alert(1)", "window.hacked=1", "document.title='hacked'", "parent.hacked=1")
TAGS = (
    "<script>{js}</script>",
    "<img src=x onerror={js}>",
    "<svg onload={js}>",
    "<svg><script>{js}</script></svg>",
    "<iframe src='javascript:{js}'></iframe>",
    "<iframe srcdoc='<script>{js}</script>'></iframe>",
    "<body onload={js}>",
    "<details open ontoggle={js}>x</details>",
    "<math><mtext><script>{js}</script></mtext></math>",
    "<a href='javascript:{js}'>x</a>",
    "<form action='javascript:{js}'><button>x</button></form>",
    "<object data='data:text/html,<script>{js}</script>'></object>",
    "<embed src='javascript:{js}'>",
    "<style>@import 'javascript:{js}'</style>",
    "<link rel=stylesheet href='//evil.example/x.css'>",
    "<meta http-equiv=refresh content='0;url=javascript:{js}'>",
    "<base href='//evil.example/'>",
    "<input autofocus onfocus={js}>",
    "<template><script>{js}</script></template>",
    "<!--><script>{js}</script-->",
)
LINKS = (
    "[x](javascript:{js})",
    "[x](JaVaScRiPt:{js})",
    "[x](&#106;avascript:{js})",
    "[x](java\tscript:{js})",
    "[x]( javascript:{js})",
    "[x](data:text/html,<script>{js}</script>)",
    "[x](vbscript:{js})",
    "[x](file:///etc/passwd)",
    "<javascript:{js}>",
    "![x](javascript:{js})",
    "![x](https://evil.example/pixel.png)",
    "![x](data:image/svg+xml,<svg onload={js}>)",
    "[![x](https://evil.example/a.png)](javascript:{js})",
    "[x]: javascript:{js}\n\n[x]",
    "[x](https://evil.example/ \"' onmouseover={js} '\")",
    "[x](<javascript:{js}>)",
)
FRAMES = ("{0}", "- {0}", "> {0}", "# {0}", "| a |\n|---|\n| {0} |", "`{0}`", "**{0}**", "~~~\n{0}")
BROKEN = (
    "```html\n<script>{js}</script>",
    '```"onmouseover={js}\n<img src=x onerror={js}>\n```',
    "````\n```\n<svg onload={js}>",
    "&lt;script&gt;{js}&lt;/script&gt;",
    "&#60;script&#62;{js}&#60;/script&#62;",
    "<scr\nipt>{js}</scr\nipt>",
    "\\<script>{js}\\</script>",
    '<a href="https://x.example" onclick="{js}">x',
    "&#x110000;&#0;&#xd800;<b>",
    "__proto__ [__proto__](constructor) ```__proto__\nx\n```",
    "[x](https://a.example/'\"><script>{js}</script>)",
    "https://evil.example/<script>{js}</script>",
    'www.evil.example/"onload={js}',
    "<" * 60 + "script>{js}",
    "[" * 60 + "x](javascript:{js})",
    "*" * 40 + "<img src=x onerror={js}>" + "_" * 40,
)


def attacks() -> list[str]:
    """Return 200 different texts or more."""
    found = [one.replace("{js}", js) for one, js in product((*TAGS, *LINKS, *BROKEN), ACTIONS)]
    plain = [one.replace("{js}", ACTIONS[1]) for one in (*TAGS[:4], *LINKS[:4])]
    found += [frame.replace("{0}", one) for frame, one in product(FRAMES[1:], plain)]
    assert len(set(found)) >= 200
    return list(dict.fromkeys(found))
