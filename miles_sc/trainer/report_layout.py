"""What is the same in every report: the page's frame and style sheet, and how to read each panel."""

REWARD_PANELS = (
    (
        "Reward",
        "Thick: greedy answers of the clean trainer policy to problems it never trains on, the number that counts. "
        "Thin: what the sampler earned, noisier and of another distribution. Small tasks and few rollouts may show no "
        "gain from any loss.",
    ),
    (
        "KL of the clean policy from its start",
        "How far the policy has walked. Learning moves it too, so a low value is no merit by itself; compare at equal reward.",
    ),
    (
        "Sampler mismatch",
        "How far the sampler (q) is from the trainer (p) on sampled tokens. Near zero the run is on-policy and "
        "centering has nothing to subtract. Staleness counts here as well, and centering alone does not cure it.",
    ),
    (
        "Head mass",
        "Share of the distribution that the K recorded candidates hold. Centering is exact on them and scales the rest "
        "by one ratio; the less they hold, the coarser it is.",
    ),
    (
        "Tail ratio",
        "That scale: what the candidates leave under the sampler, over what they leave under the trainer. Near 1 the "
        "two agree; far from 1, record more candidates. Rollouts without a readable tail are left out.",
    ),
    ("Generation speed", "Tokens per second of the sampler; recording candidates costs some of it."),
    (
        "Bands",
        "Lines are means over seeds, bands reach from the lowest to the highest seed. Overlapping bands do not tell arms apart.",
    ),
)
DRIFT_PANELS = (
    (
        "KL from start, logarithmic",
        "The reward is a constant, so the true gradient is zero and whatever moves the policy is drift or noise. The "
        "right answer is the noise floor of the unbiased sampler, not zero.",
    ),
    (
        "Dotted lines",
        "The same arm with an unbiased sampler, where such a run is there. Above its dotted line an arm drifts; on the "
        "line it does not.",
    ),
    ("Stale samplers", "A stale sampler is an older policy, and centering alone does not cure that."),
)

_STYLE = """
:root { color-scheme: light dark;
  --text: #1c1c1c; --back: #f6f6f4; --card: #ffffff; --line: #d9d9d6; --faint: #5b5b5b; --link: #005a9c; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e6; --back: #17181a; --card: #202225; --line: #3a3d42; --faint: #a9abae; --link: #7cc0f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 4rem; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .2rem 0 .8rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
a { color: var(--link); }
code { font-size: .9em; }
.summary { font-size: 1.05rem; max-width: 62rem; }
.small { color: var(--faint); font-size: .85rem; }
.note { border-left: .25rem solid #d55e00; background: var(--card); padding: .45rem .8rem; margin: .5rem 0;
  font-size: .92rem; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); font-size: .82rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.numbers { font-variant-numeric: tabular-nums; min-width: 100%; overflow-wrap: normal; }
.numbers thead th { vertical-align: bottom; font-weight: 600; color: var(--faint); }
.numbers tbody th { overflow-wrap: break-word; max-width: 16rem; }
.numbers td span { display: block; white-space: nowrap; color: var(--faint); }
.settings th { font-weight: 400; white-space: nowrap; }
.settings span::before { content: "— "; }
figure { margin: .6rem 0; padding: .75rem; background: #ffffff; border: 1px solid var(--line); border-radius: .5rem; }
figure img { display: block; width: 100%; height: auto; }
.reading { display: grid; grid-template-columns: minmax(9rem, 14rem) 1fr; gap: .35rem 1rem; font-size: .92rem;
  margin: .8rem 0; }
.reading dt { font-weight: 600; }
.reading dd { margin: 0; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
ul { padding-left: 1.2rem; }
li span, .settings span { color: var(--faint); font-size: .85rem; }
@media (max-width: 40rem) { .reading { grid-template-columns: 1fr; } .reading dd { margin-bottom: .5rem; } }
@media print { body { max-width: none; background: #ffffff; } figure { break-inside: avoid; } }
"""

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def framed(*, title: str, body: str) -> str:
    """The whole page; title and body are HTML already."""
    return _FRAME.format(title=title, style=_STYLE, body=body)
