-- Every run that loaded a partition, also those that a newer run has replaced: its late retry must not come over that.
CREATE TABLE unit_run (
    dataset   text        NOT NULL,
    day       date        NOT NULL,
    run       text        NOT NULL,
    row_count bigint      NOT NULL,
    loaded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (dataset, day, run)
);
INSERT INTO unit_run (dataset, day, run, row_count, loaded_at)
SELECT dataset, day, run, row_count, loaded_at FROM unit_partition;
