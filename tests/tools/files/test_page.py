"""Text in a page is escaped wherever it stands, and its elements are nested as they should be."""

from html.parser import HTMLParser

from tools.files.page import Cell, bullets, counted, folded, legend, page, table, text

NASTY = "<script>&\"'"


class Nesting(HTMLParser):
    """It fails where an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        assert tag != "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_all_text_is_escaped_and_elements_are_closed():
    rows = [[NASTY, Cell(NASTY, "note")], [Cell(NASTY, "group", 2)]]
    tables = [table([NASTY, NASTY], rows), table([NASTY, NASTY], rows, "numbers", [1], ["own", ""])]
    body = [text(NASTY, "h1"), *tables, bullets([NASTY]), counted(NASTY, [NASTY]), legend(NASTY, {NASTY: NASTY})]
    parser = Nesting()
    parser.feed(page(NASTY, [*body, folded(NASTY, bullets([]))]))
    assert parser.open == []
    assert sum(said.count(NASTY) for said in parser.said) == 1 + 1 + 2 * (2 + 3) + 1 + 2 + 3 + 1


def test_a_row_has_its_class_and_a_wide_cell_its_columns():
    made = table(["a", "b"], [["1", "2"], [Cell("all", "group", 2)]], "numbers", [1], ["alike", ""])
    assert '<table class="numbers">' in made and '<tr class="alike"><td>1</td><td class="word">2</td></tr>' in made
    assert '<tr><td class="group" colspan=2>all</td></tr>' in made
