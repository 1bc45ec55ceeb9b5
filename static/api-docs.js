"use strict";

const place = document.getElementById("swagger-ui");
SwaggerUIBundle({
  url: place.dataset.schema,
  domNode: place,
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
});
