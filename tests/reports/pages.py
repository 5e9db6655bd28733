"""Reads pages of reports as their readers do."""

import html
import json
import re


def captions(page: str) -> list[str]:
    """Return the captions of all figures."""
    return [html.unescape(text) for text in re.findall(r"<figcaption>(.*?)</figcaption>", page)]


def headings(page: str) -> list[str]:
    """Return the headings of figures and tables."""
    return [html.unescape(text) for text in re.findall(r"<h3>(.*?)</h3>", page)]


def chart_items(page: str) -> dict:
    """Return what the page's charts are drawn from, by the id of the place."""
    (text,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def curves(page: str) -> list[dict[str, tuple[list[float], list[float]]]]:
    """Return the lines of each chart by the name of the method: places and values. A page has at least one chart."""
    charts = []
    for item in chart_items(page).values():
        (root,) = item["doc"]["roots"]
        lines = {}
        for renderer in root["attributes"]["renderers"]:
            attributes = renderer["attributes"]
            if "name" in attributes and attributes["glyph"]["name"] in ("Line", "Step"):
                columns = dict(attributes["data_source"]["attributes"]["data"]["entries"])
                lines[attributes["name"]] = (columns["x"], columns["y"])
        charts.append(lines)
    assert charts, "two pages without charts would be equal"
    return charts


def rows(page: str) -> list[list[str]]:
    """Return the texts of the rows of all tables, without those of their heads."""
    found = []
    for row in re.findall(r"<tr>(<th scope='row'>.*?)</tr>", page, re.DOTALL):
        cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        found.append([html.unescape(re.sub(r"<[^>]*>", "", cell)).replace("\u00a0", " ") for cell in cells])
    return found
