"""From the vendor's metadata to tables: types, lies, and names that must not become identifiers."""

from __future__ import annotations

import pytest

from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.warehouse.catalog import object_name, read_metadata, wanted_table
from lockstep.warehouse.model import Column, ColumnType, key_of, short_name, vault_schema

METADATA = """modified_date,extract,extract_label,column_name,column_label,type,length,related_extract,formula
,Object.study__v,Study,id,Id,Number,20,,
,Object.study__v,Study,name__v,Name,String,128,,
,Object.study__v,Study,budget__c,Budget,Number,,,
,Object.study__v,Study,seen__c,Seen,DateTime,,,
,Object.study__v,Study,day__c,Day,Date,,,
,Object.study__v,Study,open__c,Open,Boolean,,,
,Object.study__v,Study,text__c,Text,LongText,32000,,
,Object.study__v,Study,status_icon__c,Icon,String,1,,
,Document.document_version__sys,Document,document_number__v,Number,Number,18,,
,Object.security_policy__sys,Policy,description__sys,Words,String,128,,
"""


def test_every_vendor_type_has_a_column_that_holds_it():
    columns = read_metadata(METADATA)["study__v"].by_name
    assert columns["budget__c"].type is ColumnType.NUMBER
    assert columns["seen__c"].type is ColumnType.TIMESTAMP
    assert columns["day__c"].type is ColumnType.DATE
    assert columns["open__c"].type is ColumnType.BOOLEAN
    assert columns["name__v"] == Column("name__v", ColumnType.TEXT, 128)
    assert columns["text__c"] == Column("text__c", ColumnType.TEXT, None)


def test_an_id_is_text_whatever_the_metadata_says():
    """Guards leading zeros and the vault's letter in front."""
    assert read_metadata(METADATA)["study__v"].by_name["id"].type is ColumnType.TEXT


def test_the_known_lies_of_the_metadata_are_corrected():
    tables = read_metadata(METADATA)
    assert tables["document_version__sys"].by_name["document_number__v"].type is ColumnType.TEXT
    assert tables["security_policy__sys"].by_name["description__sys"].length == 255
    assert tables["study__v"].by_name["status_icon__c"].length == 3968


def test_the_order_of_columns_and_extra_ones_do_not_matter():
    text = "type,column_name,new_in_26r1,extract\nNumber,n__c,x,Object.a__v\n"
    assert read_metadata(text)["a__v"].by_name["n__c"].type is ColumnType.NUMBER


def test_metadata_without_its_columns_is_refused():
    with pytest.raises(Terminal, match="column_name"):
        read_metadata("extract,type\nObject.a__v,String\n")


def test_a_column_that_the_metadata_does_not_know_becomes_text_and_is_not_lost():
    table = wanted_table("study__v", [["id", "budget__c", "unknown__c"]], read_metadata(METADATA))
    assert [column.type for column in table.columns] == [ColumnType.TEXT, ColumnType.NUMBER, ColumnType.TEXT]


@pytest.mark.parametrize("name", ['a"; DROP TABLE b', "", "a b", "ä", "_lockstep_load", "x" * 200, "a\x00"])
def test_a_name_that_could_be_more_than_a_name_is_refused(name: str):
    with pytest.raises(Terminal):
        wanted_table("study__v", [["id", name]], {})
    with pytest.raises(Terminal):
        wanted_table(name, [["id"]], {})


def test_more_columns_than_a_table_can_hold_are_refused_by_number():
    with pytest.raises(Terminal, match="5001 columns"):
        wanted_table("wide__c", [["id", *(f"c{n}" for n in range(5000))]], {})


def test_two_long_names_that_begin_alike_stay_two_tables():
    """Guards against the silent cut: both would be one table."""
    first, second = ("a" * 70 + letter for letter in "xy")
    assert short_name(first, 63) != short_name(second, 63)
    assert len(short_name(first, 63)) == 63
    assert short_name("study__v", 63) == "study__v"


def test_picklists_and_metadata_have_keys_of_several_columns():
    assert key_of("metadata") == ("extract", "column_name")
    assert key_of("picklist__sys") == ("object", "object_field", "picklist_value_name")
    assert key_of("study__v") == ("id",)


@pytest.mark.parametrize("extract", ["Object.study__v", "study__v", "Object.study__v_deletes"])
def test_an_extract_is_known_by_its_object(extract: str):
    assert object_name(extract) == "study__v"


def test_a_vault_id_that_no_schema_can_carry_is_refused():
    assert vault_schema("1001") == "vault_1001"
    with pytest.raises(InvalidInput):
        vault_schema("v" * 50)
