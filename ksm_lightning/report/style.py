"""The style sheet of the report: responsive, with a dark mode, and without external resources."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2127; --soft: #5c6470; --line: #d9dde3; --page: #f5f6f8; --card: #ffffff;
  --accent: #b3131d; --error: #b3131d; --warning: #9a5b00; --advice: #1f4fb8; --good: #1b7a3d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3af; --line: #363b43; --page: #121417; --card: #1a1a1a;
    --accent: #ff7b81; --error: #ff7b81; --warning: #f0b054; --advice: #8db4ff; --good: #6fd394; }
  figure img { filter: invert(0.898) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
main, header, footer { max-width: 62rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 0 0 .7rem; }
p { margin: .4rem 0; }
a { color: var(--advice); }
.soft, figcaption, footer { color: var(--soft); }
.small, figcaption, footer, nav { font-size: .875rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: .8rem 0 0; padding: 0; }
nav a { display: inline-block; padding: .25rem 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; margin: 1rem 0; }
dl.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: .8rem 0 0; }
dl.cards div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .7rem; }
dl.cards dt { color: var(--soft); font-size: .8rem; line-height: 1.3; }
dl.cards dd { margin: .15rem 0 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
figure { margin: 0; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { margin-top: .3rem; text-align: center; }
.scroll { overflow-x: auto; max-width: 100%; }
.scroll:focus-visible { outline: 2px solid var(--advice); }
table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .875rem; padding-bottom: .4rem; }
th, td { padding: .4rem .8rem .4rem 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
tbody th { white-space: normal; overflow-wrap: normal; min-width: 8rem; }
td.wide { white-space: normal; min-width: 10rem; }
thead th { color: var(--soft); font-weight: 500; }
tbody th { font-weight: 500; }
tr.own th, tr.own td { font-weight: 700; }
ul.findings { list-style: none; margin: 0; padding: 0; display: grid; gap: .7rem; }
ul.findings li { border-left: 4px solid var(--mark); padding: .1rem 0 .1rem .8rem; }
ul.findings h3 { font-size: 1rem; margin: 0; }
.mark { color: var(--mark); font-size: .75rem; font-weight: 700; letter-spacing: .04em; text-transform: uppercase; }
.error { --mark: var(--error); } .warning { --mark: var(--warning); } .advice { --mark: var(--advice); }
.good { --mark: var(--good); }
code, pre { font: .875em/1.5 ui-monospace, monospace; }
code { background: var(--page); border: 1px solid var(--line); border-radius: .3rem; padding: 0 .25rem;
  display: inline-block; max-width: 100%; }
pre { overflow-x: auto; margin: .6rem 0 0; padding: .8rem; background: var(--page); border-radius: .5rem; }
summary { cursor: pointer; padding: .3rem 0; }
footer { padding-bottom: 2rem; }
"""
