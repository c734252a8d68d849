"""The walk over machine code of support/sass.py, on small examples."""

from __future__ import annotations

import pytest
import sass

# A wait for each value of a pointer: grouped kernels wait at the start, the two roles of dense ones later.
ROLES = """
LDC R1, c[0x0][0x28]
S2R R2, SR_TID.X
ULDC.64 UR4, c[0x0][0x320]
ISETP.NE.U32.AND P0, PT, RZ, UR4, PT
ISETP.NE.AND.EX P0, PT, RZ, UR5, PT, P0
@!P0 BRA =roles
ACQBULK
LDG.E.CONSTANT R6, desc[UR8][R4.64]
roles: ISETP.GT.AND P1, PT, R2, 0xf, PT
@P1 BRA =producer
@P0 BRA =consume
ACQBULK
consume: STG.E.128 desc[UR8][R4.64], R8
EXIT
producer: ULDC.64 UR6, c[0x0][0x320]
UISETP.NE.U32.AND UP0, UPT, UR6, URZ, UPT
UISETP.NE.AND.EX UP0, UPT, UR7, URZ, UPT, UP0
PLOP3.LUT P2, PT, PT, PT, UP0, 0x80, 0x0
@P2 BRA =produce
ACQBULK
produce: UTMALDG.3D [UR8], [UR10]
EXIT
"""


def assemble(text: str) -> list[sass.Instruction]:
    """Instructions of 16 bytes; `name:` marks a place, `=name` is its address."""
    lines = [line for line in text.strip().splitlines() if line]
    places = {line.split(":")[0]: 16 * i for i, line in enumerate(lines) if ":" in line}
    dumped = []
    for i, line in enumerate(lines):
        body = line.split(": ")[-1]
        for name, address in places.items():
            body = body.replace(f"={name}", hex(address))
        dumped.append(f"        /*{16 * i:04x}*/                   {body} ;      /* 0x0 */")
    return sass.parse(sass.function_lines(["\t\tFunction : kernel", *dumped])["kernel"])


def names(text: str) -> list[str]:
    return [found.name for found in sass.accesses_before_wait(assemble(text))]


def test_straight_code() -> None:
    assert names("ACQBULK\nLDG.E R2, [R4.64]\nEXIT") == []
    assert names("LDG.E R2, [R4.64]\nACQBULK\nEXIT") == ["LDG.E"]
    assert names("LDS R2, [R4]\nLDC R3, c[0x0][0x28]\nREDUX UR4, R2\nACQBULK\nEXIT") == []


@pytest.mark.parametrize(
    "access",
    ["LD.E", "ST.E", "STG.E", "ATOM.E", "ATOMG.E.ADD", "REDG.E", "LDGSTS.E", "UBLKCP.S.G", "UTMASTG.3D"],
)
def test_every_kind_of_access(access: str) -> None:
    assert names(f"{access} R2, [R4.64]\nACQBULK\nEXIT") == [access]


def test_both_ways_of_a_branch() -> None:
    """A wait on one way of a branch whose condition is not known does not protect the other."""
    text = "ISETP.NE.AND P0, PT, R3, RZ, PT\n@P0 BRA =over\nACQBULK\nover: LDG.E R2, [R4.64]\nEXIT"
    assert names(text) == ["LDG.E"]
    assert names(text.replace("@P0 BRA =over\n", "")) == []
    assert names("@P0 ACQBULK\nLDG.E R2, [R4.64]\nEXIT") == ["LDG.E"]
    assert names("@P0 EXIT\nACQBULK\nLDG.E R2, [R4.64]\nEXIT") == []
    assert names("BRA =wait\nread: LDG.E R2, [R4.64]\nEXIT\nwait: ACQBULK\nBRA =read") == []
    assert names("BRA.DIV UR4, =far\nACQBULK\nEXIT\nfar: LDG.E R2, [R4.64]\nEXIT") == ["LDG.E"]
    assert names("CALL.REL.NOINC =far\nACQBULK\nEXIT\nfar: LDG.E R2, [R4.64]\nRET.REL.NODEC R6 0x0") == [
        "LDG.E"
    ]


def test_waits_that_depend_on_a_parameter() -> None:
    assert names(ROLES) == []


def on_blackwell() -> str:
    """ROLES as ptxas writes it for 12.x: uniform loads of constants, and comparisons of 64 bits."""
    text = ROLES.replace("ULDC.64", "LDCU.64")
    first = "ISETP.NE.U32.AND P0, PT, RZ, UR4, PT\nISETP.NE.AND.EX P0, PT, RZ, UR5, PT, P0\n"
    second = "UISETP.NE.U32.AND UP0, UPT, UR6, URZ, UPT\nUISETP.NE.AND.EX UP0, UPT, UR7, URZ, UPT, UP0\n"
    assert first in text
    assert second in text
    text = text.replace(first, "LDCU.64 UR2, c[0x0][0x358]\nISETP.NE.S64.AND P0, PT, RZ, UR4, PT\n")
    return text.replace(second, "UISETP.NE.S64.AND UP0, UPT, UR6, URZ, UPT\n")


def test_waits_that_depend_on_a_parameter_on_blackwell() -> None:
    text = on_blackwell()
    assert names(text) == []
    assert names(text.replace("LDCU.64 UR6, c[0x0][0x320]", "LDCU.64 UR6, c[0x0][0x328]")) != []
    # A load of four registers overwrites the parameter.
    assert names(text.replace("LDCU.64 UR2, c[0x0][0x358]", "LDCU.128 UR2, c[0x0][0x350]")) != []


def test_both_words_of_a_64_bit_comparison_count() -> None:
    compared = "LDCU.64 UR4, c[0x0][0x320]\nUISETP.EQ.S64.AND UP0, UPT, UR4, URZ, UPT"
    text = compared + "\nBRA.U UP0, =null\nACQBULK\nnull: LDG.E R2, [R4.64]\nEXIT"
    low_is_zero: sass.Words = {0x320: 0, 0x324: sass.NONZERO}
    null: sass.Words = {0x320: 0, 0x324: 0}
    assert "LDG.E" not in [found.name for found in sass.reached_before_wait(assemble(text), low_is_zero)]
    assert "LDG.E" in [found.name for found in sass.reached_before_wait(assemble(text), null)]


@pytest.mark.parametrize("wait", range(3))
def test_every_wait_is_needed(wait: int) -> None:
    """The example without one of its three waits is faulty."""
    parts = ROLES.split("ACQBULK")
    missing = "ACQBULK".join(parts[: wait + 1]) + "NOP" + "ACQBULK".join(parts[wait + 1 :])
    assert (
        names(missing) == [["LDG.E.CONSTANT", "STG.E.128", "UTMALDG.3D"], ["STG.E.128"], ["UTMALDG.3D"]][wait]
    )


def test_conditions_that_do_not_match() -> None:
    assert names(ROLES.replace("@P0 BRA =consume", "@!P0 BRA =consume")) == ["STG.E.128"]
    other = ROLES.replace("ULDC.64 UR6, c[0x0][0x320]", "ULDC.64 UR6, c[0x0][0x328]")
    assert names(other) != []
    overwritten = ROLES.replace("@P0 BRA =consume", "ISETP.NE.AND P0, PT, R2, R3, PT\n@P0 BRA =consume")
    assert names(overwritten) == ["STG.E.128"]


def test_an_indirect_branch_may_go_anywhere() -> None:
    assert names("BRX R2 -0x10\nACQBULK\nLDG.E R2, [R4.64]\nEXIT") == ["LDG.E"]
    assert names("ACQBULK\nBRX R2 -0x10\nLDG.E R2, [R4.64]\nEXIT") == []


def test_what_the_walk_cannot_follow_is_an_error() -> None:
    with pytest.raises(AssertionError, match="BSSY"):
        names("BSSY B0, =out\nACQBULK\nBSYNC B1\nout: EXIT")
    assert names("BSSY B0, =out\nACQBULK\nBSYNC B0\nout: EXIT") == []


def test_noncoherent_loads() -> None:
    """Those of ld.global.nc, behind the wait as well as ahead of it; other loads are none."""
    loads = ["LDG.E.CONSTANT", "LDG.E.128.CONSTANT", "LDG.E.NA.U16.CONSTANT", "TEX.B.LL", "TLD4.R"]
    code = assemble("".join(f"{name} R2, [R4.64]\n" for name in loads) + "EXIT")
    assert [found.name for found in sass.noncoherent_loads(code)] == loads
    assert [found.name for found in sass.noncoherent_loads(assemble(ROLES))] == ["LDG.E.CONSTANT"]
    others = ["LDG.E", "LDG.E.NA.U16", "LD.E", "LDS.128", "LDC.64", "ULDC.64", "LDGSTS.E", "LDG.E.STRONG.GPU"]
    assert not sass.noncoherent_loads(assemble("\n".join(f"{name} R2, [R4.64]" for name in others)))
