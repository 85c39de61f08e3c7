-- Gold for people who read with SQL. The sessions beside this table are versions behind a view, made by the proxy block.
CREATE SCHEMA ticks_report;
CREATE TABLE ticks_report.daily (
    day date NOT NULL,
    org_id text NOT NULL,
    project_id text NOT NULL,
    ticks bigint NOT NULL,
    full_ticks bigint NOT NULL,
    replayed_ticks bigint NOT NULL,
    rows bigint NOT NULL,
    median_lag_seconds double precision NOT NULL,
    newest_tick text NOT NULL,
    PRIMARY KEY (day, org_id, project_id)
);
