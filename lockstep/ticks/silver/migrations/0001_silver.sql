-- One row per project. Bronze numbers the ticks of a project without a gap; everything up to `watermark` is in silver
-- and nothing after it is. A replay lowers the watermark and raises the generation.
CREATE TABLE lane (
    project_id text        PRIMARY KEY,
    org_id     text        NOT NULL,
    watermark  bigint      NOT NULL DEFAULT 0 CHECK (watermark >= 0),
    generation integer     NOT NULL DEFAULT 1 CHECK (generation > 0),
    parked     text,
    parked_at  timestamptz,
    error      text,
    moved_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    hinted_at  timestamptz
);
CREATE INDEX lane_parked ON lane (parked_at) WHERE parked IS NOT NULL;

-- One row per tick that was applied, at its newest generation. Rows above the watermark are of a replay under way.
CREATE TABLE applied (
    project_id text        NOT NULL REFERENCES lane,
    sequence   bigint      NOT NULL,
    tick_id    text        NOT NULL UNIQUE,
    generation integer     NOT NULL,
    rows       bigint      NOT NULL,
    tables     jsonb       NOT NULL,
    fence      bigint      NOT NULL,
    applied_at timestamptz NOT NULL,
    PRIMARY KEY (project_id, sequence)
);
CREATE INDEX applied_when ON applied (applied_at);

-- What each tick left in each silver table: the base and the predecessor of the next one.
CREATE TABLE table_state (
    project_id text   NOT NULL REFERENCES lane,
    name       text   NOT NULL,
    sequence   bigint NOT NULL,
    epoch      text   NOT NULL,
    key        text[] NOT NULL,
    version    bigint NOT NULL,
    rows       bigint NOT NULL,
    PRIMARY KEY (project_id, name, sequence)
);
