"""A statement as a file: CSV for programs, PDF for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from xml.sax.saxutils import escape

from djmoney.money import Money
from reportlab.lib import colors
from reportlab.lib.enums import TA_RIGHT
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.platypus import Flowable, LongTable, Paragraph, SimpleDocTemplate, Spacer, Table, TableStyle

from ledger.money import format_money
from ledger.statements import Statement, StatementLine
from ledger.wording import describe

_TEXT = ParagraphStyle("text", fontName="Helvetica", fontSize=9, leading=12)
_RIGHT = ParagraphStyle("right", parent=_TEXT, alignment=TA_RIGHT)
_TITLE = ParagraphStyle("title", parent=_TEXT, fontName="Helvetica-Bold", fontSize=18, leading=24)
_QUIET = ParagraphStyle("quiet", parent=_TEXT, textColor=colors.HexColor("#55606e"))
_LINE = colors.HexColor("#d5dbe3")


def as_csv(statement: Statement) -> bytes:
    """UTF-8, one row per line of the statement between its opening and its closing balance; exact amounts."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\r\n")
    rows.writerow(["date", "kind", "reference", "lines", "amount", "balance", "currency"])
    edge = partial(_edge, statement)
    rows.writerow(edge(statement.month.first.isoformat(), "opening balance", statement.opening))
    for line in statement.lines:
        rows.writerow(
            [
                line.day.isoformat(),
                line.kind,
                line.reference,
                line.lines,
                f"{line.amount:f}",
                f"{line.balance:f}",
                statement.currency,
            ]
        )
    rows.writerow(edge(statement.month.last.isoformat(), "closing balance", statement.closing))
    return text.getvalue().encode()


def _edge(statement: Statement, day: str, kind: str, balance: Decimal) -> list[object]:
    return [day, kind, "", "", "", f"{balance:f}", statement.currency]


def as_pdf(statement: Statement) -> bytes:
    """A4, as many pages as it takes, the head of the table on each."""
    file = io.BytesIO()
    document = SimpleDocTemplate(
        file,
        pagesize=A4,
        leftMargin=20 * mm,
        rightMargin=20 * mm,
        topMargin=18 * mm,
        bottomMargin=20 * mm,
        title=f"Apex statement {statement.month}",
        author="Apex",
        subject=f"{statement.owner}, {statement.month.first} to {statement.month.last}",
    )
    money = partial(_money, statement)
    story: list[Flowable] = [
        Paragraph("Statement of credits", _TITLE),
        Paragraph(escape(statement.owner), _TEXT),
        Paragraph(
            f"{statement.month.first} to {statement.month.last} (days of UTC) · all amounts in {statement.currency}",
            _QUIET,
        ),
        Spacer(1, 6 * mm),
        _summary(statement),
        Spacer(1, 6 * mm),
    ]
    if statement.lines:
        story.append(_lines(statement))
    else:
        story.append(Paragraph("Nothing was booked in this month.", _QUIET))
    if not statement.month.is_over:
        story += [Spacer(1, 4 * mm), Paragraph("The month is not over: more may be booked.", _QUIET)]
    story += [Spacer(1, 4 * mm), Paragraph(f"Closing balance {money(statement.closing)}", _TEXT)]
    footer = partial(_footer, f"Apex · made {statement.made_at:%Y-%m-%d %H:%M:%S} UTC")
    document.build(story, onFirstPage=footer, onLaterPages=footer)
    return file.getvalue()


def _money(statement: Statement, amount: Decimal) -> str:
    return format_money(Money(amount, statement.currency))


def _summary(statement: Statement) -> Table:
    money = partial(_money, statement)
    cells = {
        "Opening balance": money(statement.opening),
        "Credited": money(statement.credited),
        "Debited": money(statement.debited),
        "Closing balance": money(statement.closing),
    }
    table = Table([list(cells), list(cells.values())], colWidths=[42 * mm] * 4, hAlign="LEFT")
    table.setStyle(
        TableStyle(
            [
                ("FONT", (0, 0), (-1, 0), "Helvetica", 8),
                ("TEXTCOLOR", (0, 0), (-1, 0), _QUIET.textColor),
                ("FONT", (0, 1), (-1, 1), "Helvetica-Bold", 10),
                ("LEFTPADDING", (0, 0), (-1, -1), 0),
                ("LINEBELOW", (0, 1), (-1, 1), 0.5, _LINE),
                ("BOTTOMPADDING", (0, 1), (-1, 1), 8),
            ]
        )
    )
    return table


def _lines(statement: Statement) -> LongTable:
    money = partial(_money, statement)
    head = ["Date", "What", "Amount", "Balance"]
    rows: list[list[object]] = [
        [str(line.day), Paragraph(_what(line), _TEXT), money(line.amount), money(line.balance)]
        for line in statement.lines
    ]
    table = LongTable(
        [head, *rows], colWidths=[24 * mm, 72 * mm, 37 * mm, 37 * mm], repeatRows=1, hAlign="LEFT"
    )
    table.setStyle(
        TableStyle(
            [
                ("FONT", (0, 0), (-1, -1), "Helvetica", 9),
                ("FONT", (0, 0), (-1, 0), "Helvetica-Bold", 9),
                ("ALIGN", (2, 0), (-1, -1), "RIGHT"),
                ("VALIGN", (0, 0), (-1, -1), "TOP"),
                ("LINEBELOW", (0, 0), (-1, -1), 0.4, _LINE),
                ("LEFTPADDING", (0, 0), (0, -1), 0),
                ("RIGHTPADDING", (-1, 0), (-1, -1), 0),
            ]
        )
    )
    return table


def _what(line: StatementLine) -> str:
    name = escape(describe(line.kind, line.lines))
    if line.reference:
        return f'{name}<br/><font size="7" color="#55606e">{escape(line.reference)}</font>'
    return name


def _footer(text: str, canvas: object, document: SimpleDocTemplate) -> None:
    pen: object = canvas
    pen.saveState()  # type: ignore[attr-defined]
    pen.setFont("Helvetica", 8)  # type: ignore[attr-defined]
    pen.drawString(20 * mm, 12 * mm, text)  # type: ignore[attr-defined]
    pen.drawRightString(A4[0] - 20 * mm, 12 * mm, f"page {document.page}")  # type: ignore[attr-defined]
    pen.restoreState()  # type: ignore[attr-defined]


FORMATS: Mapping[str, tuple[str, Callable[[Statement], bytes]]] = {
    "csv": ("text/csv; charset=utf-8", as_csv),
    "pdf": ("application/pdf", as_pdf),
}
