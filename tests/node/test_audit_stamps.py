"""The file of audits' results: every text is read back, and a line that a full disk cut off is left out."""

import pytest

from tplr.errors import ConfigError
from tplr.node.audit_stamps import AuditStamp, append_stamp, read_stamps


def stamp(text: str) -> AuditStamp:
    return AuditStamp(first=1, last=2, validator=0, agrees=False, text=text)


def test_what_a_validator_published_is_read_back(tmp_path):
    """A difference quotes it, and it may hold any character."""
    found = [stamp("published a\u2028b"), stamp("published \x85\x0b\u2029")]
    for one in found:
        append_stamp(tmp_path / "audits.jsonl", one)
    assert read_stamps(tmp_path / "audits.jsonl") == found


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "audits.jsonl"
    append_stamp(path, stamp("one"))
    append_stamp(path, stamp("two"))
    path.write_bytes(path.read_bytes()[:-9])
    assert read_stamps(path) == [stamp("one")]
    append_stamp(path, stamp("three"))
    assert read_stamps(path) == [stamp("one"), stamp("three")]


def test_another_file_is_an_error(tmp_path):
    (tmp_path / "page.html").write_text("<html>\n")
    with pytest.raises(ConfigError, match="expected the stamps"):
        read_stamps(tmp_path / "page.html")
