"""The pictures of the pages about concepts, and README's."""

from __future__ import annotations

from docs.drawings.svg import CELL, Drawing


def pointer_shift() -> Drawing:
    """S = 9, AR = 1, reserve 2: a buffer of 2(S-1) = 16 rows for each head."""
    drawing = Drawing(760, 330, "pointer-shift: the window moves through one buffer, and nothing is copied")
    x, past = 150, 8
    drawing.text(20, 32, "pointer-shift: one buffer per head, reserve 2.0 = 2(S-1) rows", "title")
    for row, (name, start) in enumerate((("step t", 2), ("step t+1", 3), ("last row", 7))):
        y = 62 + row * 62
        drawing.text(20, y + 17, name)
        kinds = ["free"] * start + ["past"] * past + ["new"] + ["free"] * (16 - start - past - 1)
        drawing.cells(x, y, kinds)
        if row == 0:
            drawing.bracket(x + start * CELL, x + (start + past) * CELL, y + CELL, "graph input: S-1 past rows")
            drawing.line((x + 10.5 * CELL, y + CELL + 22), (x + 10.5 * CELL, y + CELL + 3))
            drawing.note(x + 11 * CELL, y + CELL + 20, "graph output, right behind the input")
        if row == 1:
            drawing.line((x + 2.1 * CELL, y + 38), (x + 2.95 * CELL, y + 38))
            drawing.text(
                x + 3.2 * CELL, y + 42, "both pointers + one row: the new row is part of the past now", "faint", size=12
            )
    y = 62 + 3 * 62
    drawing.text(20, y + 17, "then, once")
    drawing.cells(x, y, ["past"] * past + ["free"] * 8)
    drawing.line((x + 12 * CELL, y - 34), (x + 12 * CELL, y - 12), (x + 4 * CELL, y - 12), (x + 4 * CELL, y - 2))
    drawing.note(x + 12.4 * CELL, y - 9, "S-1 rows are copied, after S-1 tokens")
    drawing.legend(x, y + 52, (("past", "past rows"), ("new", "new row"), ("free", "free")))
    return drawing


def slot() -> Drawing:
    drawing = Drawing(760, 270, "slot: a fixed window; the mask says which columns hold a token")
    x = 150
    drawing.text(20, 32, "slot (the default): addresses never change", "title")
    drawing.text(20, 79, "window")
    drawing.cells(x, 62, ["past"] * 5 + ["free"] * 7)
    drawing.bracket(x, x + 12 * CELL, 62 + CELL, "graph input: S-AR rows, always at this address")
    drawing.text(20, 153, "mask")
    drawing.cells(x, 136, ["past"] * 5 + ["free"] * 7 + ["new"], ["0"] * 5 + ["-"] * 7 + ["0"])
    drawing.note(x + 13.5 * CELL, 153, "0 opens a column, - closes it")
    drawing.text(20, 215, "after the step")
    drawing.cells(x, 198, ["past"] * 5 + ["new"] + ["free"] * 6)
    drawing.cells(x + 15 * CELL, 198, ["new"])
    drawing.note(x + 16.4 * CELL, 215, "scratch: graph output")
    drawing.line(
        (x + 15.5 * CELL, 198 + CELL), (x + 15.5 * CELL, 238), (x + 5.5 * CELL, 238), (x + 5.5 * CELL, 198 + CELL + 3)
    )
    drawing.note(x + 6 * CELL, 256, "one strided write of the new row into the first free one")
    return drawing


def mirror() -> Drawing:
    drawing = Drawing(760, 270, "mirror: a ring whose pages are mapped twice, one after the other")
    x, wide = 110, 72
    drawing.text(20, 32, "mirror: a ring, whose pages are mapped twice", "title")
    drawing.text(20, 79, "addresses")
    names = ["page 0", "page 1", "page 2", "page 3"]
    drawing.cells(x, 62, ["past", "free", "past", "past", "past", "free", "past", "past"], names * 2, width=wide)
    drawing.bracket(
        x + 2.3 * wide, x + 4.7 * wide, 62 + CELL, "the window: one range of addresses, across the ring's end"
    )
    drawing.text(20, 197, "memory")
    drawing.cells(x + 2 * wide, 180, ["past", "free", "past", "past"], names, width=wide)
    for page in (0, 3):
        for copy in (0, 4):
            start = x + (page + copy + 0.5) * wide
            drawing.line((start, 128), (x + (2 + page + 0.5) * wide, 177), dashed=True)
    drawing.text(
        x,
        240,
        "New rows are written once and seen at both places. Nothing is copied, however long the text becomes.",
        "faint",
        size=12,
    )
    return drawing


def checkpoint_and_tail() -> Drawing:
    drawing = Drawing(760, 300, "A state as checkpoint and tail")
    x = 150
    drawing.text(20, 32, "A state: the checkpoint at a boundary, and the rows since then", "title")
    drawing.text(20, 79, "before a step")
    drawing.box(x, 62, 4 * CELL, CELL, "sink", "checkpoint")
    drawing.cells(x + 4 * CELL, 62, ["past"] * 8 + ["free"] * 8)
    drawing.bracket(x + 4 * CELL, x + 9 * CELL, 62 + CELL, "tail")
    drawing.bracket(x + 9 * CELL, x + 12 * CELL, 62 + CELL, "read: K-1 rows")
    drawing.text(20, 161, "after it")
    drawing.box(x, 144, 4 * CELL, CELL, "sink", "checkpoint")
    drawing.cells(x + 4 * CELL, 144, ["past"] * 8 + ["new"] * 3 + ["bad"] * 2 + ["free"] * 3)
    drawing.bracket(x + 12 * CELL, x + 15 * CELL, 144 + CELL, "accepted")
    drawing.bracket(x + 15 * CELL, x + 17 * CELL, 144 + CELL, "rejected")
    drawing.text(20, 243, "rewind")
    drawing.box(x, 226, 4 * CELL, CELL, "sink", "checkpoint")
    drawing.cells(x + 4 * CELL, 226, ["past"] * 5 + ["free"] * 11)
    drawing.line((x + 15 * CELL, 238), (x + 9 * CELL + 4, 238))
    drawing.text(
        x,
        280,
        "Within the tail a rewind moves the cursor. Before it, the text is run again from the checkpoint.",
        "faint",
        size=12,
    )
    return drawing


def sink() -> Drawing:
    drawing = Drawing(760, 290, "The first token is a sink that no graph computes")
    x = 150
    drawing.text(20, 32, "The first token: stored once, computed by no graph", "title")
    drawing.text(20, 79, "cache")
    drawing.cells(x, 62, ["sink"] + ["past"] * 9 + ["new"] + ["free"] * 5)
    drawing.line((x + 0.5 * CELL, 118), (x + 0.5 * CELL, 62 + CELL + 3))
    drawing.note(x, 134, "its keys and values: from sink.safetensors, before the first step")
    drawing.note(20, 184, "range of one result, SmolLM2-135M, layer 11")
    drawing.text(20, 214, "position 0")
    drawing.box(x, 198, 560, CELL, "sink", "reaches 24,876")
    drawing.text(20, 250, "all others")
    drawing.box(x, 234, 2, CELL, "past")
    drawing.note(x + 10, 251, "at most 18.56: they have 85 of the 65,536 steps of one range for all")
    return drawing


def lpbq() -> Drawing:
    drawing = Drawing(760, 270, "LPBQ: a 4-bit integer scales each block of 4-bit weights")
    x, wide = 150, 140
    drawing.text(20, 32, "LPBQ: one output channel of a matrix, blocks of 64 inputs", "title")
    drawing.text(20, 79, "weights")
    for block, factor in enumerate((7, 15, 3, 9)):
        left = x + block * (wide + 6)
        drawing.cells(left, 62, ["weights"] * 5, ["-3", "7", "0", "...", "2"], width=wide / 5)
        drawing.bracket(left, left + wide, 62 + CELL, "64 integers of 4 bits")
        drawing.box(left + wide / 2 - 20, 132, 40, CELL, "new", str(factor))
        drawing.line((left + wide / 2, 132), (left + wide / 2, 114))
        drawing.line((x + 2 * wide + 9, 206), (left + wide / 2, 160))
    drawing.text(20, 149, "block scales")
    drawing.text(20, 223, "channel's scale")
    drawing.box(x + 2 * wide - 51, 206, 120, CELL, "past", "s, a float")
    drawing.text(
        x,
        256,
        "weight = integer x factor x s.   A factor has 4 bits, 1 to 15: with blocks of 64, 1/16 bit for each weight.",
        "faint",
        size=12,
    )
    return drawing


def verify() -> Drawing:
    drawing = Drawing(760, 300, "Verify graphs: all weights are read once for several tokens")
    drawing.text(20, 32, "A pass of a verify graph, 8 rows", "title")
    x, wide = 150, 70
    words = ["return", "the", "sum", "of", "the", "list", ".", "It"]
    chosen = ["the", "sum", "of", "all", "", "", "", ""]
    drawing.text(20, 79, "rows in")
    drawing.cells(x, 62, ["past"] + ["new"] * 7, words, width=wide)
    drawing.text(x + wide / 2, 56, "last token", "faint", anchor="middle", size=11)
    drawing.bracket(x + wide, x + 8 * wide, 62 + CELL, "drafts of what may follow")
    drawing.box(x, 124, 8 * wide, 34, "weights", "all weights, read once")
    drawing.text(20, 201, "model chooses")
    drawing.cells(x, 184, ["weights"] * 3 + ["bad"] + ["free"] * 4, chosen, width=wide)
    drawing.line((x + 1.5 * wide, 226), (x + 0.5 * wide, 226), (x + 0.5 * wide, 211))
    drawing.text(
        x + 1.6 * wide, 230, "equals the draft behind it: the row of that draft is already computed", "faint", size=12
    )
    drawing.text(
        x, 258, "4 tokens in one pass: 3 drafts were right, and the 4th token is the model's own.", "faint", size=12
    )
    drawing.text(
        x, 278, "Rows behind the first wrong draft are dropped. The text is that of plain decoding.", "faint", size=12
    )
    return drawing


def what_goes_where() -> Drawing:
    drawing = Drawing(900, 330, "From a checkpoint to the NPU")
    drawing.text(20, 32, "What goes where", "title")
    drawing.note(140, 60, "on a Linux machine", anchor="middle")
    drawing.note(740, 60, "on the device", anchor="middle")
    drawing.box(20, 76, 150, 76, "past", "checkpoint", "safetensors, GGUF,", "GPTQ, AWQ, LoRA")
    drawing.box(225, 76, 150, 76, "box", "edgekv export", "calibrate, quantize,", "check: 0 float nodes")
    drawing.box(
        430, 66, 170, 96, "weights", "bundle", "int4 and int8 weights,", "static graphs, tokenizer,", "sealed manifest"
    )
    drawing.box(225, 206, 150, 60, "box", "edgekv compile", "Qualcomm's compiler")
    drawing.box(430, 206, 170, 60, "weights", "context binaries", "one copy of the weights")
    drawing.box(690, 66, 190, 60, "box", "edgekv run loop", "sampling, drafts, prefixes")
    drawing.box(690, 156, 190, 44, "new", "KV cache", "outside of the graphs")
    drawing.box(690, 230, 190, 60, "sink", "NPU (HTP), or CPU", "integers only")
    drawing.line((170, 114), (223, 114))
    drawing.line((375, 114), (428, 114))
    drawing.line((515, 162), (515, 184), (300, 184), (300, 204))
    drawing.line((375, 236), (428, 236))
    drawing.line((600, 96), (688, 96))
    drawing.line((600, 244), (688, 252))
    drawing.line((760, 126), (760, 154))
    drawing.line((810, 200), (810, 228))
    drawing.line((760, 228), (760, 202))
    drawing.note(515, 288, "the same bundle for Genie, GenieX,", anchor="middle")
    drawing.note(515, 305, "onnxruntime-genai, LiteRT, AI Hub", anchor="middle")
    return drawing


ALL = (pointer_shift, slot, mirror, checkpoint_and_tail, sink, lpbq, verify, what_goes_where)
