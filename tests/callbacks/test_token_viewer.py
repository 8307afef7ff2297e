"""The page of a snapshot: its numbers are the record's, it runs in a browser, and nothing in it acts as markup."""

import json
import re
import shutil
import subprocess

import pytest
import torch

from callbacks.token_viewer import _TEMPLATE, CANDIDATE, CLIPPED, SILENCED, TokenViewer, chosen_rows, page
from stapo_lightning.errors import ConfigError
from stapo_lightning.models import load_tokenizer
from stapo_lightning.objective import S2T, squared_logit_gradients
from tests.doubles import TINY, Recorder, datamodule, module, trainer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")

HOSTILE = "</script><script>document.title = 'hacked'</script><b>&amp;"


def _completion(number, reward, tokens, marks, **changes):
    n = len(tokens)
    return {
        "group": number // 2, "prompt": "What is <b>1</b>?", "answer": "1", "reward": reward,
        "advantage": 1.0 if reward else -1.0, "truncated": False, "update": 5, "tau_h": 0.31, "tokens": tokens,
        "probability": [0.9] * n, "entropy": [0.2] * n, "ratio": [1.0] * n, "gradient": [0.01] * n, "marks": marks,
    } | changes  # fmt: skip


def _content():
    texts = ["one ", HOSTILE, "\n", "two"]
    return {
        "updates": [5, 5], "selector": "S2T", "tau_p": 0.002, "texts": texts, "ids": [11, 12, 13, 14],
        "completions": [
            _completion(0, 1.0, [0, 1, 2, 3], [0, SILENCED | CANDIDATE, 0, CANDIDATE],
                        probability=[0.9, 0.0005, 0.5, 0.001], entropy=[0.1, 0.25, 0.4, 0.9],
                        gradient=[0.0, 0.12, 0.01, 0.02]),
            _completion(1, 0.0, [3, 3], [CLIPPED, 0], ratio=[0.7, 1.0]),
            _completion(2, None, [0], [0], probability=[None]),
        ],
    }  # fmt: skip


# ---- what a page holds ----------------------------------------------------------------------------------------------


def _data(html):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def test_a_page_holds_its_content_and_nothing_of_it_is_markup():
    html = page(_content())
    assert _data(html) == _content()
    assert "hacked" in html and "<script>document" not in html
    assert html.count("</script>") == _TEMPLATE.read_text().count("</script>")


def test_a_page_loads_nothing():
    html = page(_content())
    assert "default-src 'none'" in html
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|fetch\(|XMLHttpRequest", html)


def test_groups_with_the_most_silenced_tokens_are_chosen():
    #          group 0       group 1       group 2
    silenced = [0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 3, 0]
    assert chosen_rows(silenced, 4, 8) == [8, 9, 10, 11, 0, 1, 2, 3]
    assert chosen_rows(silenced, 4, 2) == [8, 10]  # not all fit: those with silenced tokens
    assert chosen_rows(silenced, 4, 6) == [8, 9, 10, 11, 0, 2]
    assert chosen_rows(silenced, 4, 99) == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]


def test_numbers_of_a_page_are_those_of_the_record(tmp_path):
    recorder = Recorder()
    viewer = TokenViewer(every_n_updates=2, completions=8)
    run = trainer(tmp_path, max_steps=6, callbacks=[recorder, viewer])
    run.fit(module(selector=S2T(tau_p=0.2)), datamodule=datamodule())
    assert sorted(path.name for path in (tmp_path / "token_viewer").iterdir()) == [
        "update-2.html", "update-4.html", "update-6.html",
    ]  # fmt: skip
    batch, record = recorder.batches[1], recorder.records[1]
    data = _data((tmp_path / "token_viewer" / "update-4.html").read_text())
    assert (data["updates"], data["selector"], data["tau_p"]) == ([3, 4], "S2T", 0.2)
    rows = chosen_rows(record.silenced.sum(1).tolist(), 4, 8)
    assert len(data["completions"]) == 8
    half = len(batch) // 2
    gradient = squared_logit_gradients(batch, record)
    tokenizer = load_tokenizer(TINY)
    for row, shown in zip(rows, data["completions"], strict=True):
        end = int(batch.completion_lengths[row])
        ids = batch.completion_ids[row, :end]
        update = 0 if row < half else 1
        total = gradient[update * half : (update + 1) * half].sum()
        assert shown["update"] == 3 + update
        assert shown["tau_h"] == pytest.approx(record.tau_h[update], rel=1e-3)
        assert [data["ids"][place] for place in shown["tokens"]] == ids.tolist()
        assert "".join(data["texts"][place] for place in shown["tokens"]) == tokenizer.decode(ids)
        assert (shown["prompt"], shown["reward"]) == (batch.prompts[row].text, float(batch.rewards[row]))
        for name, values in (
            ("probability", record.scores.probs[row, :end]), ("entropy", record.scores.entropy[row, :end]),
            ("ratio", record.ratio[row, :end]), ("gradient", gradient[row, :end] / total),
        ):  # fmt: skip
            assert shown[name] == pytest.approx(values.tolist(), rel=1e-3), name
        marks = torch.tensor(shown["marks"])
        assert torch.equal((marks & SILENCED) > 0, record.silenced[row, :end])
        assert torch.equal((marks & CANDIDATE) > 0, record.candidates[row, :end])
        assert torch.equal((marks & CLIPPED) > 0, record.clipped[row, :end])
    assert any(SILENCED & mark for shown in data["completions"] for mark in shown["marks"])


def test_the_first_and_the_last_update_have_a_page(tmp_path):
    viewer = TokenViewer(every_n_updates=100)
    trainer(tmp_path, max_steps=4, callbacks=[viewer]).fit(module(prompts_per_update=8), datamodule=datamodule())
    assert sorted(path.name for path in (tmp_path / "token_viewer").iterdir()) == ["update-1.html", "update-4.html"]


def test_all_wrong_arguments_come_in_one_error(tmp_path):
    with pytest.raises(ConfigError) as error:
        wrong = TokenViewer(every_n_updates=0, completions=0)
        trainer(tmp_path, callbacks=[wrong]).fit(module(), datamodule=datamodule())
    assert "TokenViewer.every_n_updates=0: must be at least 1" in str(error.value)
    assert "TokenViewer.completions=0: must be at least 1" in str(error.value)


# ---- readable -------------------------------------------------------------------------------------------------------


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_has_enough_contrast_in_light_and_dark():
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)
    blocks = re.findall(r":root \{(.*?)\n\s*\}", _TEMPLATE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        colours = dict(re.findall(r"--([\w]+): (#[0-9a-f]{6});", block))
        backgrounds = [name for name in colours if re.fullmatch(r"[sd]\d|page|panel", name)]
        assert len(backgrounds) == 20
        for name in backgrounds:
            assert _contrast(colours["text"], colours[name]) >= 4.5, name
        for name in ("quiet", "silenced"):
            assert min(_contrast(colours[name], colours[on]) for on in ("page", "panel")) >= 4.5, name
        # The marks are lines: 3 is enough.
        for name in ("survivor", "clipped", "accent"):
            assert _contrast(colours[name], colours["page"]) >= 3, name


# ---- in a browser ---------------------------------------------------------------------------------------------------


def _in_browser(folder, html, script=""):
    """What a headless Chromium makes of a page, and what `script`, run at its end, returns."""
    source = folder / "page.html"
    result = (
        f"<script>document.documentElement.dataset.result = JSON.stringify((() => {{{script}}})() ?? null);</script>"
    )
    source.write_text(html.replace("</body>", f"{result}</body>"))
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--use-angle=swiftshader", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={folder / 'profile'}", "--window-size=900,700", "--virtual-time-budget=2000", "--dump-dom",
        source.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r'<html[^>]* data-result="([^"]*)"', done.stdout)
    return done.stdout, json.loads(
        found.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )


@in_browser
def test_a_browser_shows_what_the_policy_wrote_as_text(tmp_path):
    dom, (title, texts, classes, summary) = _in_browser(
        tmp_path,
        page(_content()),
        """
        const spans = [...document.querySelectorAll(".tokens")[0].children];
        return [document.title, spans.map((s) => s.textContent), spans.map((s) => s.className),
                document.querySelector("summary").innerText];
        """,
    )
    assert title == "Tokens of update 5"
    assert texts == ["one ", HOSTILE, "↵\n", "two"]
    # Probabilities 0.9, 0.0005, 0.5, 0.001: -log10 of it, in halves: 0.09, 6.6, 0.6, 6.
    assert classes == ["s0", "s7 silenced", "s1", "s6 survivor"]
    assert "1 silenced, 12 % of the update's squared gradient" in summary
    assert "What is &lt;b&gt;1&lt;/b&gt;?" in dom


PRESS = """
const press = (key) => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const tip = () => document.getElementById("tip");
const at = () => document.activeElement.textContent;
"""


@in_browser
def test_keyboard_goes_from_token_to_token_and_shows_the_numbers(tmp_path):
    _, (silenced, numbers, right, survivor, first, end, hidden, stops) = _in_browser(
        tmp_path,
        page(_content()),
        PRESS
        + """
        press("n");
        const found = [at(), tip().innerText];
        press("ArrowRight"); found.push(at());
        press("ArrowRight"); found.push(tip().innerText);
        press("Home"); found.push(at());
        press("End"); found.push(at());
        press("Escape"); found.push(tip().hidden);
        return [...found, document.querySelectorAll(".tokens [tabindex='0']").length];
        """,
    )
    assert silenced == HOSTILE
    assert "token 2 of 4, id 12" in numbers
    assert "probability 0.05 %, entropy 0.25 nats" in numbers
    assert "12 % of the update's squared gradient, had it trained" in numbers
    assert "silenced: advantage above 0, probability below tau_p = 0.002, entropy below tau_h = 0.31" in numbers
    assert right == "↵\n"
    assert "trains: unlikely, but its entropy is not below tau_h = 0.31" in survivor
    assert (first, end, hidden) == ("one ", "two", True)
    assert stops == 3  # one token of each completion is in the tab order


@in_browser
def test_mouse_colours_and_filter(tmp_path):
    _, (tip_text, ratios, ones, failed, only) = _in_browser(
        tmp_path,
        page(_content()),
        PRESS
        + """
        const choose = (id, value) => {
          const select = document.getElementById(id);
          select.value = value; select.dispatchEvent(new Event("change"));
          return [...document.querySelectorAll("details")].map((d) => d.checkVisibility());
        };
        const clipped = document.querySelectorAll(".tokens")[1].children[0];
        clipped.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        const text = tip().innerText;
        const radio = document.querySelector("input[value=ratio]");
        radio.checked = true; radio.dispatchEvent(new Event("change"));
        const classes = [...document.querySelectorAll(".tokens")[1].children].map((s) => s.className);
        const ones = choose("reward", "1"), failed = choose("reward", "null");
        choose("reward", "all");
        document.getElementById("only").click();
        return [text, classes, ones, failed, [...document.querySelectorAll("details")].map((d) => d.checkVisibility())];
        """,
    )
    assert "ratio 0.7, clipped: no gradient" in tip_text
    assert ratios == ["d0 clipped", "d4"]
    assert ones == [True, False, False]
    assert failed == [False, False, True]
    assert only == [True, False, False]


@in_browser
def test_long_completions_are_drawn_when_they_are_opened(tmp_path):
    content = _content()
    content["completions"] = [_completion(i, 1.0, [0] * 4000, [0] * 3999 + [SILENCED]) for i in range(16)]
    _, (at_first, after, all_open) = _in_browser(
        tmp_path,
        page(content),
        PRESS
        + """
        const count = () => document.querySelectorAll(".tokens span").length;
        const found = [count()];
        press("n"); press("n"); found.push(count());
        document.getElementById("open").click();
        return [...found, count()];
        """,
    )
    assert (at_first, after, all_open) == (4000, 8000, 64000)
